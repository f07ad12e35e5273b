"""The definitions of the operations on a cache's rows, in plain MLX operations.

Part of the composed back end: what the other back ends are compared with.
"""

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx

from mlx_h2o.operations.composed import buffers, ema, turbo
from mlx_h2o.operations.composed.placement import placed
from mlx_h2o.operations.requests import (
    AccumulateRequest,
    AttentionAccumulateRequest,
    AttentionRequest,
    AttentionResult,
    KeyDiversityRequest,
    Parts,
    QuantizeAppendRequest,
)

_START = mx.array([0])
LEAST_NORM = 1e-12  # a key of zeros has the direction 0, not NaN


def accumulate_scores(request: AccumulateRequest) -> mx.array:
    """The moving average as ``ema`` defines it."""
    with placed(request.stream):
        return ema.accumulate(
            request.importance, request.scores, decay=request.decay, masked=request.masked
        )


def attention_and_accumulate(
    request: AttentionAccumulateRequest,
    attend: Callable[[AttentionRequest], AttentionResult],
) -> tuple[mx.array, mx.array]:
    """Attention, then ``add_mass`` of its weights, or the moving average of its scores."""
    attention, whole = request.attention, request.importance
    attention.return_scores, attention.return_lse = request.decay is not None, False
    found = attend(attention)
    with placed(attention.stream):
        if request.decay is None:
            importance = add_mass(whole, cast(mx.array, found.weights))
        else:
            scores, masked = cast(mx.array, found.scores), attention.hides
            part = _first(whole, scores.shape[3])
            part = ema.accumulate(part, scores, decay=request.decay, masked=masked)
            importance = _with_first(whole, part)
        # Untied, the scores of every step would wait for someone to ask, graph and all.
        return mx.depends(found.out, [importance]), importance


def add_mass(importance: mx.array, weights: mx.array) -> mx.array:
    """``importance`` [B, H, N] plus the weights [B, H, queries, N] that all queries of a KV head
    give to each row; NaN, of a row that is not scored, counts as 0.

    ``importance`` may have more rows, which stay as they are.
    """
    part = _first(importance, weights.shape[3])
    part = mx.where(mx.isnan(part), 0.0, part) + weights.sum(axis=2)
    return _with_first(importance, part)


def _first(importance: mx.array, rows: int) -> mx.array:
    return importance if importance.shape[2] == rows else importance[:, :, :rows]


def _with_first(importance: mx.array, part: mx.array) -> mx.array:
    """``importance`` with ``part`` in the place of its first rows."""
    if importance.shape[2] == part.shape[2]:
        return part
    return mx.slice_update(importance, part, _START, [2])


def key_diversity(request: KeyDiversityRequest) -> mx.array:
    with placed(request.stream):
        return diversity(request.keys)


def diversity(keys: mx.array) -> mx.array:
    """Minus the cosine of each of the keys [B, H, N, D] with the mean of the normalised keys of its
    head, float32."""
    directions = _normalised(keys.astype(mx.float32))
    mean = _normalised(mx.mean(directions, axis=2, keepdims=True))
    return -mx.squeeze(directions @ mx.swapaxes(mean, -1, -2), -1)


def _normalised(vectors: mx.array) -> mx.array:
    norm = mx.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / mx.maximum(norm, LEAST_NORM)


def quantize_append(
    request: QuantizeAppendRequest, encode: buffers.Encode = turbo.encode_rows
) -> tuple[Parts, Parts]:
    """The new rows packed, by ``encode`` where they become codes, then a scatter of each part."""
    size = request.group_size
    with placed(request.stream):
        return appended(
            request,
            buffers.packed(
                request.new_keys, len(request.keys), request.bits, size, turbo.KEYS, encode
            ),
            buffers.packed(
                request.new_values, len(request.values), request.v_bits, size, turbo.VALUES, encode
            ),
        )


def appended(
    request: QuantizeAppendRequest, keys: Sequence[mx.array], values: Sequence[mx.array]
) -> tuple[Parts, Parts]:
    """The stored arrays with packed rows [B, H, L, ...] in their slots, by MLX's own scatter."""
    count = len(request.keys)
    with placed(request.stream):
        last = mx.array(request.keys[0].shape[2] - 1, mx.uint32)
        slots = mx.minimum(request.slots, last)
        pairs = zip((*request.keys, *request.values), (*keys, *values), strict=True)
        first, *others = (buffers.put_rows(stored, slots, part) for stored, part in pairs)
        # The rows of one step hang together, or the graph of what nobody reads would grow.
        parts = (mx.depends(first, others), *others)
    return parts[:count], parts[count:]
