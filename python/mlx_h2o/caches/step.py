"""A step: tokens that are processed together, and which rows each of them sees."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import mlx.core as mx

Padding = tuple[int, int | None]
"""Padding tokens that come first, and own tokens before more padding (None: no more padding)."""
NO_PADDING: Padding = (0, None)


@dataclass(eq=False)
class Step:
    """``length`` tokens for each of ``sequences``. ``spans`` are start and stop of each sequence's
    own tokens, and the rest is padding; empty: no padding."""

    length: int
    sequences: int
    spans: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, length: int, padding: Sequence[Padding]) -> Step:
        """The step of the next ``length`` tokens of sequences with this padding."""
        found = []
        for left, own in padding:
            start = min(left, length)
            found.append((start, min(length, start + (length if own is None else own))))
        padded = any(one != (0, length) for one in found)
        return cls(length, len(padding), found if padded else ())

    @cached_property
    def counts(self) -> list[int]:
        """How many of the tokens are each sequence's own."""
        if not self.spans:
            return [self.length] * self.sequences
        return [stop - start for start, stop in self.spans]

    def slots(self, rows: Sequence[int]) -> mx.array:
        """int32 [B, 1, L, 1]: where each token goes, behind these ``rows`` of its sequence; padding
        goes after all own tokens."""
        token, before = mx.arange(self.length)[:, None], per_sequence((*rows,))
        if not self.spans:
            return before + token
        starts = tuple(start for start, _ in self.spans)
        return before + (token - per_sequence(starts)) % self.length

    def after(self, padding: Sequence[Padding]) -> list[Padding]:
        """The padding that is still to come."""
        pairs = zip(padding, self.spans or [(0, self.length)] * self.sequences, strict=True)
        return [
            (left - start, None if own is None else own - (stop - start))
            for (left, own), (start, stop) in pairs
        ]

    def mask(
        self, rows: Sequence[Sequence[int]], return_array: bool = False
    ) -> mx.array | str | None:
        """bool [B, 1, length, slots]: what each token sees, rows of its own sequence.

        If the causal mask suffices: None for one token, "causal" for more, or with
        ``return_array`` that mask [length, slots]. A padding token sees only itself: its scores
        reach no row of the sequence, and its output is finite, which the next layer needs.

        Args:
            rows: rows of every sequence in each segment, before the tokens are added to the last.
            return_array: return an array instead of "causal".
        """
        length, before = self.length, rows[-1]
        if not self.spans and all(len(set(one)) <= 1 for one in rows):
            stored = sum(max(one, default=0) for one in rows)
            if length == 1 or not return_array:
                return None if length == 1 else "causal"
            return mx.arange(stored + length) <= mx.arange(length)[:, None] + stored
        if length == 1 == len(rows) and not self.spans:
            return mx.arange(max(before) + 1) <= per_sequence((*before,))
        token, spans = mx.arange(length)[:, None], self.spans or [(0, length)] * self.sequences
        starts, stops = (per_sequence(numbers) for numbers in zip(*spans, strict=True))
        own, slots = (token >= starts) & (token < stops), mx.arange(max(before) + length)
        place_of = self.slots(before)
        newest = (slots == place_of) | (own & (slots <= place_of))
        # A token of padding sees no packed rows either.
        parts = [(mx.arange(max(one)) < per_sequence((*one,))) & own for one in rows[:-1]]
        return mx.concatenate([*parts, newest], axis=-1) if parts else newest


@lru_cache(maxsize=16)
def per_sequence(numbers: tuple[int, ...]) -> mx.array:
    """int32 [B, 1, 1, 1]: a number for each sequence, one array for all layers. It is evaluated, so
    that any thread can read it."""
    flat: Any = memoryview(array("i", numbers))  # MLX reads lists slower
    return mx.array(flat.cast("B").cast("i", (len(numbers), 1, 1, 1)))
