"""Attention over rows in segments of different formats, as if they were one array.

Arguments are not checked.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.requests import first_part
from mlx_h2o.operations.resolved import Attended


class AttentionRows(NamedTuple):
    """Keys and values as attention takes them: arrays, or packed rows and how they are packed."""

    keys: Any
    values: Any
    settings: dict[str, Any]
    shared: bool = False  # of batch 1, seen by every query; their scores are not needed


def masking(mask: mx.array | str | None) -> tuple[bool, mx.array | None]:
    """A mask in the form of unchecked operations: whether it is causal, and the array."""
    return (True, None) if isinstance(mask, str) else (False, mask)


def merged_attention(
    segments: Sequence[AttentionRows],
    queries: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    return_scores: bool = True,
    return_lse: bool = False,
    row_bias: mx.array | None = None,
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Attention over the rows of all segments, each read on its own, as if they were one array.

    The outputs are averaged by the shares ``exp(lse_i - lse)`` that the segments have in the
    common denominator. A query that sees nothing in any of them gives zeros.

    Args:
        segments: in order of slots; "causal" means the last ``Lq`` rows of the last one.
        queries: [B, Hq, Lq, D].
        scale: finite factor of the products.
        mask: as in ``fast.scaled_dot_product_attention_with_scores``, for rows not shared.
        sinks: learned logits [Hq], which count once: with the last segment.
        return_scores: return the scores and the lse.
        return_lse: return the lse even without the scores.
        row_bias: float32 [B, H, at least N], for the one segment that is not shared.

    Returns:
        Output in the dtype of the queries, scores float32 [B, Hq, Lq, N] and lse [B, Hq, Lq].
    """
    operations, start = resolve(), 0
    found, several = [], len(segments) > 1
    for rows in segments:
        last, part = rows is segments[-1], None
        keys, values, settings, shared = given = _in_dtype(rows, queries)
        if shared:
            found.append(_over_shared(given, queries, scale))
            continue
        if isinstance(mask, mx.array):
            end = start + first_part(keys).shape[2]
            part = mask if mask.shape[-1] == 1 else mask[..., start:end]
            start = end
        found.append(
            operations.attention(
                queries, keys, values, scale=scale, causal=last and isinstance(mask, str),
                mask=part, sinks=sinks if last else None, return_scores=return_scores,
                return_lse=several or return_scores or return_lse, row_bias=row_bias, **settings,
            )
        )  # fmt: skip
    if not several:
        return found[0][:3]
    outs, each, lses, _ = zip(*found, strict=True)
    out, lse = operations.merge_segments(outs, lses)
    scores = [one for one in each if one is not None]
    return out, mx.concatenate(scores, axis=-1) if scores else None, lse


def _in_dtype(rows: AttentionRows, queries: mx.array) -> AttentionRows:
    """Arrays of rows in the dtype of the queries; packed rows as they are."""
    if rows.settings or rows.keys.dtype == queries.dtype:
        return rows
    keys, values = rows.keys.astype(queries.dtype), rows.values.astype(queries.dtype)
    return rows._replace(keys=keys, values=values)


def _over_shared(rows: AttentionRows, queries: mx.array, scale: float) -> Attended:
    """Attention over shared rows: sequences become query heads, so that rows are read once."""
    keys, values, settings, _ = rows
    heads, batch, length = first_part(keys).shape[1], queries.shape[0], queries.shape[2]
    if batch > 1:
        queries = _turned(queries.reshape(batch, heads, -1, *queries.shape[2:]), 1)
    found = resolve().attention(queries, keys, values, scale=scale, return_lse=True, **settings)
    if batch == 1:
        return found
    out, _, lse, _ = found
    out = _turned(out.reshape(heads, batch, -1, length, out.shape[3]), batch)
    lse = _turned(cast(mx.array, lse).reshape(heads, batch, -1, length), batch)
    return out, None, lse, None


def _turned(array: mx.array, batch: int) -> mx.array:
    """Swap the first two axes, then merge: [B, H, G, ...] to [1, H * B * G, ...] for a ``batch`` of
    1, and [H, B, G, ...] to [B, H * G, ...]."""
    array = array.swapaxes(0, 1)
    return array.reshape(batch, -1, *array.shape[3:])
