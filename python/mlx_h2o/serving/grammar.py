"""Answers in JSON: which tokens may come next, by a grammar that llguidance keeps for each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from .kept import common

__all__ = ["constrain", "matcher"]

_SPACE = r"\x20|\x0A\x20{0,16}"
"""Between the parts of JSON; a small model may else go on with it for ever."""


def matcher(tokenizer: Any, size: int, schema: dict[str, Any]) -> LLMatcher:
    """What tells which tokens may come next, at its beginning.

    Args:
        tokenizer: a fast one of Hugging Face, in mlx_lm's wrapper.
        size: of the model's vocabulary.

    Raises:
        ValueError: a schema that is wrong or not supported, or another tokenizer.
    """
    more: Any = {"whitespace_pattern": _SPACE}
    known = _known(tokenizer, size)
    try:
        made = LLMatcher.grammar_from_json_schema(schema, overrides=more)
        found = LLMatcher(known, made, log_level=0)
        if not (said := found.get_error()):
            return found
    except ValueError as error:
        said = str(error)
    said = " ".join(said.split()).rstrip(".")
    raise ValueError(f"response_format.json_schema.schema is wrong: {said:.300}.")


@functools.lru_cache(1)
def _known(tokenizer: Any, size: int) -> LLTokenizer:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise ValueError("response_format needs a fast tokenizer, and the model has none.")
    return LLTokenizer(fast.to_str(), n_vocab=size, eos_token=sorted(tokenizer.eos_token_ids))


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
