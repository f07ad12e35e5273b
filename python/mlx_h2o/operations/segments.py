"""Attention over rows in segments, each kept in its own way, as if they were one array.

For callers that are right: arguments are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_h2o.operations.backends import resolve

__all__ = ["Rows", "attention_with_scores", "masking", "merged_attention"]


class Rows(NamedTuple):
    """Keys and values as attention takes them: arrays, or packed rows and how they are packed."""

    keys: Any
    values: Any
    settings: dict[str, Any]


def attention_with_scores(
    rows: Rows,
    queries: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Output, scores and lse, as ``fast.scaled_dot_product_attention_with_scores`` gives them."""
    keys, values, settings = rows
    if not settings and keys.dtype != queries.dtype:
        keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
    causal, shown = masking(mask)
    found = resolve().attention(
        queries, keys, values, scale=scale, causal=causal, mask=shown, sinks=sinks,
        return_scores=True, return_lse=True, **settings,
    )  # fmt: skip
    assert found.scores is not None and found.lse is not None
    return found.out, found.scores, found.lse


def masking(mask: mx.array | str | None) -> tuple[bool, mx.array | None]:
    """A mask as operations take it that check nothing: whether it is causal, and the array."""
    return (True, None) if isinstance(mask, str) else (False, mask)


def merged_attention(
    segments: Sequence[Rows],
    queries: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Attention over the rows of all segments, each read on its own, as if they were one array.

    The outputs are averaged by the shares ``exp(lse_i - lse)`` that the segments have in the
    common denominator. A query that sees nothing in any of them gives zeros.

    Args:
        segments: in order of slots; "causal" means the last ``Lq`` rows of the last one.
        queries: [B, Hq, Lq, D].
        scale: finite factor of the products.
        mask: as of ``fast.scaled_dot_product_attention_with_scores``, for the rows of all.
        sinks: learned logits [Hq], which count once.

    Returns:
        Output in the dtype of the queries, scores float32 [B, Hq, Lq, N] and lse [B, Hq, Lq].
    """
    found = [
        attention_with_scores(segment, queries, scale=scale, mask=part, sinks=sink)
        for segment, part, sink in _shared(segments, mask, sinks)
    ]
    if len(found) == 1:
        return found[0]
    outs, scores, lses = zip(*found, strict=True)
    out, lse, joined = resolve().merge_segments(outs, lses, scores)
    return out, joined, lse


def _shared(
    segments: Sequence[Rows], mask: mx.array | str | None, sinks: mx.array | None
) -> Iterator[tuple[Rows, mx.array | str | None, mx.array | None]]:
    """Each segment with its part of the mask; the sinks go to the last one."""
    start = 0
    for segment in segments:
        last = segment is segments[-1]
        part = mask if last else None
        rows = (segment.keys[0] if isinstance(segment.keys, tuple) else segment.keys).shape[2]
        if isinstance(mask, mx.array):
            part = mask if mask.shape[-1] == 1 else mask[..., start : start + rows]
        start += rows
        yield segment, part, sinks if last else None
