"""Attention over the rows of a store, in whatever form they are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import mlx.core as mx

from .. import fast
from ..operations.backends import operation_of
from ..stores.storage import Segment, Storage, Stored

__all__ = [
    "attention_with_probes",
    "attention_with_scores",
    "merged_attention",
    "merged_probes",
]


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


def attention_with_probes(
    store: Storage,
    queries: mx.array,
    keys: Stored,
    values: Stored,
    probes: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Output, and the logits of ``probes`` [B, H, E, D] at all rows, float32 [B, H, E, N]."""
    if store.in_segments:
        return merged_probes(store.segments(), queries, probes, scale=scale, mask=mask, sinks=sinks)
    out, _, _, logits = fast.scaled_dot_product_attention_with_probes(
        queries, keys, values, probes,
        scale=scale, mask=mask, sinks=sinks, **store.attention_settings,
    )  # fmt: skip
    return out, logits


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
    parts = [
        _of_one(segment, queries, scale=scale, mask=part, sinks=sink)
        for segment, part, sink in _shared(segments, mask, sinks)
    ]
    outs, scores, lses = zip(*parts, strict=True)
    out, lse, joined = _merged(outs, lses, scores, seen=not isinstance(mask, mx.array))
    return out, joined, lse


def merged_probes(
    segments: Sequence[Segment],
    queries: mx.array,
    probes: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The output of ``merged_attention``, and the logits of ``probes`` [B, H, E, N]."""
    outs, lses, logits = [], [], []
    for segment, part, sink in _shared(segments, mask, sinks):
        out, _, lse, found = fast.scaled_dot_product_attention_with_probes(
            queries, segment.keys, segment.values, probes,
            scale=scale, mask=part, sinks=sink, **segment.settings,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
        logits.append(found)
    out, _, joined = _merged(outs, lses, logits, seen=not isinstance(mask, mx.array))
    return out, joined


def _shared(
    segments: Sequence[Segment], mask: mx.array | str | None, sinks: mx.array | None
) -> Iterator[tuple[Segment, mx.array | str | None, mx.array | None]]:
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


def _merged(
    outs: Sequence[mx.array], lses: Sequence[mx.array], scores: Sequence[mx.array], *, seen: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """The outputs averaged by their shares of the common denominator, the log of that, and the
    scores, one behind the other.

    ``seen`` promises that every query sees something.
    """
    if len(outs) == 1:
        return outs[0], lses[0], scores[0]
    served = operation_of("merge_segments", None)
    if served is not None:
        found: tuple[mx.array, mx.array, mx.array] = served(outs, lses, scores)
        return found
    each = mx.stack([*lses], axis=-1)
    whole = mx.logsumexp(each, axis=-1)
    shares = mx.softmax(each, axis=-1)
    if not seen:
        shares = mx.where(mx.expand_dims(whole, -1) == -mx.inf, 0.0, shares)
    # float32 by promotion.
    mixed = sum(out * shares[..., at : at + 1] for at, out in enumerate(outs))
    out = cast(mx.array, mixed).astype(outs[0].dtype)
    return out, whole, mx.concatenate([*scores], axis=-1)


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
