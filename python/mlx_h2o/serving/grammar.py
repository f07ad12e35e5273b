"""Answers in JSON: which tokens may come next, by a grammar that llguidance keeps for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

__all__ = ["Grammars", "constrain"]

_SPACE = r"\x20|\x0A\x20{0,16}"
"""Between the parts of JSON; a small model may else go on with it for ever."""


class Grammars:
    """What makes matchers of JSON schemas for one tokenizer.

    Args:
        tokenizer: a fast one of Hugging Face, in mlx_lm's wrapper.
        size: of the model's vocabulary.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self._tokenizer, self._size = tokenizer, size
        self._known: LLTokenizer | None = None

    def matcher(self, schema: dict[str, Any]) -> LLMatcher:
        """Raises ValueError for a schema that is wrong or not supported."""
        if self._known is None:
            fast = getattr(self._tokenizer, "backend_tokenizer", None)
            if fast is None:
                raise ValueError("response_format needs a fast tokenizer, and the model has none.")
            ends = sorted(self._tokenizer.eos_token_ids)
            self._known = LLTokenizer(fast.to_str(), n_vocab=self._size, eos_token=ends)
        more: Any = {"whitespace_pattern": _SPACE}
        try:
            made = LLMatcher.grammar_from_json_schema(schema, overrides=more)
            found = LLMatcher(self._known, made, log_level=0)
            if not (said := found.get_error()):
                return found
        except ValueError as error:
            said = str(error)
        said = " ".join(said.split()).rstrip(".")
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
        same = 0
        while same < min(len(seen), len(answer)) and seen[same] == answer[same]:
            same += 1
        matcher.rollback(len(seen) - same)  # of drafts that were not taken
        seen[same:] = answer[same:][: matcher.try_consume_tokens(answer[same:])]
        if len(seen) < len(answer):
            return logits  # of a draft that is not taken
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error():
            raise RuntimeError(f"the schema is too much: {matcher.get_error():.300}")
        return mx.where(mx.array(bits[: logits.shape[-1]] == 1), logits, -mx.inf)

    return process
