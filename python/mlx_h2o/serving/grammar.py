"""Answers in JSON: which tokens may come next, by a grammar that llguidance keeps for each."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from .kept import common

__all__ = ["constrain", "matcher", "vocabulary_of"]

_SPACE = r"\x20|\x0A\x20{0,16}"
"""Between the parts of JSON; a small model may else go on with it for ever."""


_TRIAL = """
import signal, sys, threading
from llguidance import LLMatcher, LLTokenizer
def go():
    found = LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0)
    found.compute_bitmask()
    print(found.get_error() or "fine", end="")
signal.alarm(int(sys.argv[1]))
threading.stack_size(1 << 20)
threading.Thread(target=go).start()
"""
"""A program that says what is wrong with a grammar; nothing if stack or time are not enough."""
_SECONDS = 10
"""For which it may run."""


@functools.lru_cache(1)
def vocabulary_of(tokenizer: Any, size: int) -> LLTokenizer:
    """The tokens of a fast tokenizer of Hugging Face, in mlx_lm's wrapper; ``size``: the model's.

    Raises:
        ValueError: another tokenizer.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise ValueError("response_format needs a fast tokenizer, and the model has none.")
    return LLTokenizer(fast.to_str(), n_vocab=size, eos_token=sorted(tokenizer.eos_token_ids))


@functools.lru_cache(4)  # clients send the same again and again
def matcher(vocabulary: LLTokenizer, schema: str) -> LLMatcher:
    """What tells which tokens may come next, at its beginning, to be copied.

    Tried in a process of its own: some schemas take hours, or the stack and all that runs.

    Raises:
        ValueError: a schema that is wrong, not supported, or too much.
    """
    more: Any = {"whitespace_pattern": _SPACE}
    try:
        made = LLMatcher.grammar_from_json_schema(schema, overrides=more)
        said = subprocess.run(
            [sys.executable, "-P", "-Xutf8", "-c", _TRIAL, str(_SECONDS)], input=made,
            encoding="utf-8", capture_output=True,
        ).stdout  # fmt: skip
        if said == "fine":
            return LLMatcher(vocabulary, made, log_level=0)
    except ValueError as error:
        said = str(error)
    said = " ".join(said.partition("<state>")[0].split()).rstrip(".")
    said = said or "it is nested too deeply, or takes too long"
    raise ValueError(f"response_format.json_schema.schema is wrong: {said:.300}.")


def constrain(matcher: LLMatcher, given: int) -> Callable[[mx.array, mx.array], mx.array]:
    """A logits processor that leaves only tokens with which the answer can go on.

    Args:
        matcher: at its beginning; the processor's own.
        given: tokens of the prompt, before the answer.
    """
    seen: list[int] = []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        answer: Any = tokens[given:].tolist()
        same = common(seen, answer)
        matcher.rollback(len(seen) - same)  # of drafts that were not taken
        seen[same:] = answer[same:][: matcher.try_consume_tokens(answer[same:])]
        if len(seen) < len(answer):
            return logits  # of a draft that is not taken
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error():
            raise RuntimeError(f"the schema is too much: {matcher.get_error():.300}")
        return mx.where(mx.array(bits[: logits.shape[-1]] == 1), logits, -mx.inf)

    return process
