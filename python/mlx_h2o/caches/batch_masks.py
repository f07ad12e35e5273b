"""What each query of a batch may see: rows of its own sequence, none of them padding."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

__all__ = ["chunk_mask", "decode_mask", "new_positions"]


def decode_mask(padding: Sequence[int], slots: int) -> mx.array | None:
    """For one token: bool [B, 1, 1, slots], false in the first ``padding`` slots; None: all."""
    if not any(padding):
        return None
    return mx.arange(slots) >= _column(padding)


def chunk_mask(
    padding: Sequence[int],
    spans: Sequence[tuple[int, int]],
    before: int,
    length: int,
    *,
    return_array: bool,
) -> mx.array | str:
    """For ``length`` new tokens behind ``before`` slots: bool [B, 1, length, before + length].

    Where the causal mask says it all, "causal", or with ``return_array`` that mask [length,
    before + length]. A token that is padding sees only itself: its scores reach no row of the
    sequence, and its output is finite, which the next layer needs.
    """
    slots = mx.arange(before + length)
    queries = mx.arange(length)[:, None]
    if not any(padding) and all(span == (0, length) for span in spans):
        return slots <= queries + before if return_array else "causal"
    itself = slots == queries + before
    starts = _column([start for start, _ in spans])
    own = (queries >= starts) & (queries < _column([stop for _, stop in spans]))
    first = _column([pad + start for pad, (start, _) in zip(padding, spans, strict=True)])
    return itself | (own & (slots >= first) & (slots <= queries + before))


def new_positions(
    tokens: Sequence[int], spans: Sequence[tuple[int, int]], length: int, padding: int
) -> mx.array:
    """int32 [B, 1, length]: the places of new tokens in their sequences."""
    column = mx.arange(length, dtype=mx.int32)
    starts = [start for start, _ in spans]
    first = [seen - start for seen, start in zip(tokens, starts, strict=True)]
    positions = column + mx.array(first, mx.int32)[:, None, None]
    if any(span != (0, length) for span in spans):
        stops = mx.array([stop for _, stop in spans])[:, None, None]
        own = (column >= mx.array(starts)[:, None, None]) & (column < stops)
        positions = mx.where(own, positions, padding)
    return positions


def _column(numbers: Sequence[int]) -> mx.array:
    return mx.array(list(numbers))[:, None, None, None]
