"""JSON answers: llguidance tells which tokens a schema allows next."""

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..lm.sharing import common

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
"""A program that prints what is wrong with a grammar, or nothing if stack or time run out."""
_SECONDS = 10  # time limit of the program


@functools.lru_cache(1)
def vocabulary_of(tokenizer: Any, size: int) -> LLTokenizer:
    """The tokens of Hugging Face's fast tokenizer, in mlx_lm's wrapper. size: the model's.

    Raises:
        ValueError: the tokenizer is not a fast one, or no token ends an answer.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    ends = sorted(token for token in tokenizer.eos_token_ids if 0 <= token < size)
    if fast is None or not ends:
        raise ValueError("response_format needs a fast tokenizer and a token that ends answers.")
    return LLTokenizer(fast.to_str(), n_vocab=max(size, len(tokenizer)), eos_token=ends)


def matcher(vocabulary: LLTokenizer, schema: str, go_on: Any = lambda: None) -> LLMatcher | str:
    """A matcher in its initial state, of which each answer needs a copy; or a sentence that says
    why the schema is wrong, not supported or too complex.

    A separate process tries the schema first, since some take hours or overflow the stack.
    ``go_on`` is called meanwhile, and can end the trial by raising.
    """
    # Otherwise a small model may write white space for ever.
    more: Any = {"whitespace_pattern": r"\x20|\x0A\x20{0,16}"}
    try:
        made = LLMatcher.grammar_from_json_schema(schema, overrides=more)
        said = _tried(made, go_on)
        if said == "fine":
            return LLMatcher(vocabulary, made, log_level=0)
    except ValueError as error:
        said = str(error)
    said = " ".join(said.partition("<state>")[0].split()).rstrip(".")
    said = said or "it is nested too deeply, or takes too long"
    said = said.replace("NoExtensionBias", "no text keeps to it, since a $ref leads back to itself")
    return f"response_format.json_schema.schema is wrong: {said:.300}."


def _tried(grammar: str | None, go_on: Any) -> str:
    command = [sys.executable, "-P", "-Xutf8", "-c", _TRIAL, str(_SECONDS)]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # In a session of its own, or Ctrl-C would end it before the server.
    with subprocess.Popen(command, encoding="utf-8", start_new_session=True, **pipes) as trial:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return str(trial.communicate(grammar, 0.1)[0])
                grammar = None
                go_on()
        finally:
            trial.kill()


def constrain(matcher: LLMatcher, given: int) -> Callable[[mx.array, mx.array], mx.array]:
    """A logits processor that masks the tokens with which the answer cannot go on.

    Args:
        matcher: in its initial state; the processor's own.
        given: how many tokens the prompt has.
    """
    seen: list[int] = []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        answer: Any = tokens[given:].tolist()
        same = common(seen, answer)
        matcher.rollback(len(seen) - same)  # drafts that were rejected
        seen[same:] = answer[same:][: matcher.try_consume_tokens(answer[same:])]
        if len(seen) < len(answer):
            return logits  # the draft will be rejected
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error():
            raise RuntimeError(f"the schema is too complex: {matcher.get_error():.300}")
        return mx.where(mx.array(bits[: logits.shape[-1]] == 1), logits, -mx.inf)

    return process
