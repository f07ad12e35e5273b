"""The definitions of the operations on a cache's rows, in plain MLX operations.

Part of the composed back end: what the other back ends are compared with.
"""

from collections.abc import Callable
from typing import cast

import mlx.core as mx

from mlx_h2o.operations.arguments import StreamLike, placed
from mlx_h2o.operations.composed import buffers, turbo
from mlx_h2o.operations.composed.ema import accumulate_scores as accumulate_scores
from mlx_h2o.operations.requests import AttentionRequest, AttentionResult, Parts

_START, _NOTHING = mx.array([0]), mx.array(0.0)
LEAST_NORM = 1e-12  # a key of zeros has the direction 0, not NaN


def attention_and_accumulate(
    request: AttentionRequest,
    importance: mx.array,
    decay: float | None,
    attend: Callable[[AttentionRequest], AttentionResult],
) -> tuple[mx.array, mx.array]:
    """Attention, then ``add_mass`` of its weights, or the moving average of its scores."""
    request.return_scores, request.return_lse = decay is not None, False
    found = attend(request)
    with placed(request.stream):
        if decay is None:
            new = add_mass(importance, cast(mx.array, found.weights))
        else:
            new = add_average(importance, cast(mx.array, found.scores), decay, request.hides)
        # Untied, the scores of every step would wait for someone to ask, graph and all.
        return mx.depends(found.out, [new]), new


def add_average(importance: mx.array, scores: mx.array, decay: float, masked: bool) -> mx.array:
    """``accumulate_scores``, of an ``importance`` that may have more rows, which stay."""
    part = importance[:, :, : scores.shape[3]]
    part = accumulate_scores(part, scores, decay=decay, masked=masked)
    return mx.slice_update(importance, part, _START, [2])


def add_mass(importance: mx.array, weights: mx.array) -> mx.array:
    """``importance`` [B, H, N] plus the weights [B, H, queries, N] that all queries of a KV head
    give to each row; NaN, of a row that is not scored, counts as 0.

    ``importance`` may have more rows, which stay as they are.
    """
    part = importance[:, :, : weights.shape[3]]
    part = mx.where(mx.isnan(part), _NOTHING, part) + weights.sum(axis=2)
    return mx.slice_update(importance, part, _START, [2])


def key_diversity(keys: mx.array, *, stream: StreamLike = None) -> mx.array:
    """Minus the cosine of each of the keys [B, H, N, D] with the mean of the normalised keys of its
    head, float32."""
    with placed(stream):
        directions = _normalised(keys.astype(mx.float32))
        mean = _normalised(mx.mean(directions, axis=2, keepdims=True))
        return -mx.squeeze(directions @ mx.swapaxes(mean, -1, -2), -1)


def _normalised(vectors: mx.array) -> mx.array:
    norm = mx.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / mx.maximum(norm, LEAST_NORM)


def quantize_append(
    keys: Parts,
    values: Parts,
    new_keys: mx.array,
    new_values: mx.array,
    slots: mx.array,
    *,
    bits: int,
    group_size: int,
    v_bits: int,
    stream: StreamLike = None,
    encode: buffers.Encode = turbo.encode_rows,
) -> list[mx.array]:
    """The new rows packed, by ``encode`` where they become codes, then MLX's own scatter of each
    part into its slots: the arrays of the keys, then of the values."""
    with placed(stream):
        new = [
            *buffers.packed(new_keys, len(keys), bits, group_size, turbo.KEYS, encode),
            *buffers.packed(new_values, len(values), v_bits, group_size, turbo.VALUES, encode),
        ]
        slots = mx.minimum(slots, mx.array(keys[0].shape[2] - 1, mx.uint32))
        pairs = zip((*keys, *values), new, strict=True)
        first, *others = (buffers.put_rows(stored, slots, part) for stored, part in pairs)
        # The rows of one step hang together, or the graph of what nobody reads would grow.
        return [mx.depends(first, others), *others]
