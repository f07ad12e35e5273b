"""Attention over rows in segments, each kept in its own way, as if they were one array.

For callers that are right: arguments are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.requests import AttentionResult


class Rows(NamedTuple):
    """Keys and values as attention takes them: arrays, or packed rows and how they are packed."""

    keys: Any
    values: Any
    settings: dict[str, Any]


def masking(mask: mx.array | str | None) -> tuple[bool, mx.array | None]:
    """A mask as operations take it that check nothing: whether it is causal, and the array."""
    return (True, None) if isinstance(mask, str) else (False, mask)


_QUERIES = 128
"""Queries that see biased rows at a time, where a back end makes a matrix of their logits."""


def biased_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    bias: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    **settings: Any,
) -> mx.array:
    """Attention over rows of which each has a bias, float32 [B, H, at least N]: the output.

    Any number of queries; with many, blocks of them follow each other.
    """
    operations = resolve()
    causal, shown = masking(mask)
    if not settings and keys.dtype != queries.dtype:
        keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
    heads = (keys[0] if isinstance(keys, tuple) else keys).shape[1]
    if heads != bias.shape[1]:  # latent attention (MLA) has spread the one that is stored
        bias = mx.repeat(bias, heads // bias.shape[1], axis=1)
    given = {"scale": scale, "sinks": sinks, "row_bias": bias, **settings}
    length = queries.shape[2]
    if length <= _QUERIES or operations.name == "native":
        return operations.attention(queries, keys, values, causal=causal, mask=shown, **given).out
    found = []
    rows = keys.shape[2]
    for start in range(0, length, _QUERIES):
        stop = min(start + _QUERIES, length)
        seen = rows - length + stop if causal else rows
        part = shown if shown is None or shown.shape[-2] == 1 else shown[..., start:stop, :]
        one = operations.attention(
            queries[:, :, start:stop], keys[:, :, :seen], values[:, :, :seen], causal=causal,
            mask=part, **given,
        )  # fmt: skip
        found.append(one.out)
    return mx.concatenate(found, axis=2)


def merged_attention(
    segments: Sequence[Rows],
    queries: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    return_scores: bool = True,
    return_lse: bool = False,
) -> AttentionResult:
    """Attention over the rows of all segments, each read on its own, as if they were one array.

    The outputs are averaged by the shares ``exp(lse_i - lse)`` that the segments have in the
    common denominator. A query that sees nothing in any of them gives zeros.

    Args:
        segments: in order of slots; "causal" means the last ``Lq`` rows of the last one.
        queries: [B, Hq, Lq, D].
        scale: finite factor of the products.
        mask: as of ``fast.scaled_dot_product_attention_with_scores``, for the rows of all.
        sinks: learned logits [Hq], which count once.
        return_scores: whether the scores are wanted too, and the lse.
        return_lse: whether the lse is.

    Returns:
        Output in the dtype of the queries, scores float32 [B, Hq, Lq, N] and lse [B, Hq, Lq].
    """
    operations, found = resolve(), []
    several = len(segments) > 1
    needed = several or return_lse or return_scores
    for (keys, values, settings), part, sink in _shared(segments, mask, sinks):
        if not settings and keys.dtype != queries.dtype:
            keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
        causal, shown = masking(part)
        found.append(
            operations.attention(
                queries, keys, values, scale=scale, causal=causal, mask=shown, sinks=sink,
                return_scores=return_scores, return_lse=needed, **settings,
            )
        )  # fmt: skip
    if not several:
        return found[0]
    out, lse = operations.merge_segments(
        [one.out for one in found], [cast(mx.array, one.lse) for one in found]
    )
    scores = [one.scores for one in found if one.scores is not None]
    return AttentionResult(out, mx.concatenate(scores, axis=-1) if scores else None, lse)


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
