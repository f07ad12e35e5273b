"""Attention over the rows of a store, in whatever form they are kept."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .. import fast
from ..stores.storage import Segment, Storage, Stored

__all__ = ["attention_with_scores", "merged_attention"]


def attention_with_scores(
    store: Storage,
    queries: mx.array,
    keys: Stored,
    values: Stored,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Output, scores and lse, as ``fast.scaled_dot_product_attention_with_scores`` gives them.

    ``keys`` and ``values`` are what the store handed out: arrays, or packed rows, which the
    fused kernels read as they are. A store of several segments is read as they are instead, if
    the keys are of its own heads.
    """
    own = isinstance(keys, mx.array) and keys.shape[1] == store.positions.shape[1]
    if store.in_segments and own:
        return merged_attention(store.segments(), queries, scale=scale, mask=mask, sinks=sinks)
    return _of_one(
        Segment(keys, values, store.attention_settings),
        queries,
        scale=scale,
        mask=mask,
        sinks=sinks,
    )


def merged_attention(
    segments: Sequence[Segment],
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
    outs, scores, lses = [], [], []
    start = 0
    for segment in segments:
        last = segment is segments[-1]
        rows = (segment.keys[0] if isinstance(segment.keys, tuple) else segment.keys).shape[2]
        part = mask if last else None
        if isinstance(mask, mx.array):
            part = mask if mask.shape[-1] == 1 else mask[..., start : start + rows]
        start += rows
        out, score, lse = _of_one(
            segment, queries, scale=scale, mask=part, sinks=sinks if last else None
        )
        outs.append(out)
        scores.append(score)
        lses.append(lse)
    each = mx.stack(lses)
    whole = mx.logsumexp(each, axis=0)
    shares = mx.where(whole == -mx.inf, 0.0, mx.exp(each - whole))
    mixed = mx.sum(mx.stack(outs).astype(mx.float32) * mx.expand_dims(shares, -1), axis=0)
    return mixed.astype(queries.dtype), mx.concatenate(scores, axis=-1), whole


def _of_one(
    segment: Segment,
    queries: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> tuple[mx.array, mx.array, mx.array]:
    keys, values, settings = segment
    if isinstance(keys, tuple):
        return fast.scaled_dot_product_attention_quantized_with_scores(
            queries,
            *keys,
            *values,
            scale=scale,
            mask=mask,
            sinks=sinks,
            return_lse=True,
            **settings,
        )
    assert isinstance(values, mx.array)
    if keys.dtype != queries.dtype:
        keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
    return fast.scaled_dot_product_attention_with_scores(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks, return_lse=True
    )
