"""The definition of the scores of a long chunk in plain MLX operations: logits in blocks."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_h2o.operations import composed
from mlx_h2o.operations.arguments import runs_on_gpu
from mlx_h2o.operations.composed import accumulating
from mlx_h2o.operations.requests import (
    AttentionRequest,
    attention_request,
    first_part,
    last_queries,
    part_of,
)

BLOCK_BYTES = 1 << 21
"""Most bytes of the float32 logits of a block, unless a single row or column takes more."""
MASS_QUERIES = 512
"""Caches estimate the mass of a chunk by at least this many of its queries."""
_ON_A_GPU = 8
"""Blocks are this many times as large on a GPU, where each costs a dozen launches."""


def prefill_scores(
    request: AttentionRequest, importance: mx.array | None, decay: float | None
) -> mx.array:
    """The definition: logits in blocks, never all at once; the mass if ``decay`` is None.

    The request has only the queries that count, and its values are ignored. ``importance`` is None
    if no row has been scored.
    """
    batch, kv_heads, keys, _ = first_part(request.keys).shape
    length = request.queries.shape[2]
    # With a causal mask alone every query sees a key, unless there are fewer keys.
    empty = length > keys or replace(request, causal=False).hides
    # Compute once what all blocks share.
    request = replace(composed.masked(request), queries=request.queries.astype(mx.float32))
    if decay is None:
        request = replace(request, keys=composed.dense(request.keys))
        mass = mx.zeros((batch, kv_heads, keys))
        for queries in _ranges(request, length, keys):
            scores = composed.logits(part_of(request, queries, slice(None), [mass]))
            weights = composed.weights(scores, request.sinks, empty)
            mass = mass + weights.reshape(batch, kv_heads, -1, keys).sum(axis=2)
        return mass
    if importance is None:
        importance = mx.full((batch, kv_heads, keys), mx.nan)
    parts: list[mx.array] = []
    for columns in _ranges(request, keys, length):
        scores = composed.logits(part_of(request, slice(None), columns, parts))
        given = importance[:, :, columns], scores
        parts.append(accumulating.accumulate_scores(*given, decay=decay, masked=request.hides))
    return mx.concatenate(parts, axis=2)


def sampled(request: AttentionRequest, count: int = MASS_QUERIES) -> tuple[AttentionRequest, float]:
    """The request for at least ``count`` of its queries, fewer than twice as many, at equal
    distances up to the last one; and for how many queries each stands."""
    length = request.queries.shape[2]
    if (step := length // count) < 2:
        return request, 1.0
    request = replace(composed.masked(request), causal=False)
    some = part_of(request, slice((length - 1) % step, None, step), slice(None))
    return some, length / some.queries.shape[2]


def last_scores(
    q: mx.array, k: mx.array, *, queries: int = accumulating.MAX_QUERIES, **given: Any
) -> mx.array:
    """The scores of the last ``queries`` queries, float32 [B, Hq, queries or Lq, N]."""
    return composed.logits(last_queries(attention_request(q, k, k, **given), queries))


def _ranges(request: AttentionRequest, count: int, pairs: int) -> Iterator[slice]:
    """Blocks of ``count`` queries or keys, each of which is in ``pairs`` pairs per head."""
    batch, heads = request.queries.shape[:2]
    most = BLOCK_BYTES * (_ON_A_GPU if runs_on_gpu() else 1)
    size = max(1, most // (batch * heads * pairs * 4))
    for start in range(0, count, size):
        yield slice(start, start + size)
