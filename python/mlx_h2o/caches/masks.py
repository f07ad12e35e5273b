"""What each query may see: rows of its own sequence, none of them padding."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def mask_of(
    rows: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    length: int,
    *,
    return_array: bool,
) -> mx.array | str | None:
    """For ``length`` new tokens: bool [B, 1, length, slots].

    Where the causal mask says it all, None for one token, "causal" for more, or with
    ``return_array`` that mask [length, slots]. A token that is padding sees only itself: its scores
    reach no row of the sequence, and its output is finite, which the next layer needs.

    Args:
        rows: of each segment the rows of every sequence, before the tokens come to the last one.
        spans: which tokens are each sequence's own: from, and up to.
        length: tokens.
        return_array: whether "causal" will not do.
    """
    widths = [max(one, default=0) for one in rows]
    whole = all(span == (0, length) for span in spans)
    if whole and all(len(set(one)) <= 1 for one in rows):
        if length == 1:
            return None
        stored = sum(widths)
        causal = mx.arange(stored + length) <= mx.arange(length)[:, None] + stored
        return causal if return_array else "causal"
    parts = []
    for one, width in zip(rows[:-1], widths, strict=False):
        used = mx.arange(width) < _column(one)
        parts.append(mx.broadcast_to(used, (len(spans), 1, length, width)))
    slots = mx.arange(widths[-1] + length)
    before = _column(rows[-1])
    token = mx.arange(length)[:, None]
    starts = _column([start for start, _ in spans])
    own = (token >= starts) & (token < _column([stop for _, stop in spans]))
    place_of = before + (token - starts) % length
    newest = (slots == place_of) | (own & (slots <= place_of))
    if parts:  # a token of padding sees no packed rows either
        parts = [part & own for part in parts]
        return mx.concatenate([*parts, newest], axis=-1)
    return newest


def _column(numbers: Sequence[int]) -> mx.array:
    return mx.array(list(numbers))[:, None, None, None]
