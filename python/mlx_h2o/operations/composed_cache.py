"""The definitions of the operations on a cache's rows, in plain MLX operations.

Part of the composed back end: what the other back ends are compared with.
"""

from collections.abc import Sequence

import mlx.core as mx

from mlx_h2o.operations import buffers, ema, turbo
from mlx_h2o.operations.placement import placed
from mlx_h2o.operations.requests import (
    AccumulateRequest,
    KeyDiversityRequest,
    Parts,
    QuantizeAppendRequest,
)

LEAST_NORM = 1e-12  # a key of zeros has the direction 0, not NaN


def accumulate_scores(request: AccumulateRequest) -> mx.array:
    """The moving average as ``ema`` defines it."""
    with placed(request.stream):
        return ema.accumulate(
            request.importance, request.scores, decay=request.decay, masked=request.masked
        )


def key_diversity(request: KeyDiversityRequest) -> mx.array:
    with placed(request.stream):
        return diversity(request.keys)


def diversity(keys: mx.array, weights: mx.array | None = None) -> mx.array:
    """Minus the cosine of each key with the mean of the normalised keys of its head, float32.

    Args:
        keys: [B, H, N, D].
        weights: of each key in that mean, float32 [B, H, N]; None: the same.
    """
    directions = _normalised(keys.astype(mx.float32))
    weighted = directions if weights is None else weights[..., None] * directions
    mean = _normalised(mx.mean(weighted, axis=2, keepdims=True))
    return -mx.squeeze(directions @ mx.swapaxes(mean, -1, -2), -1)


def _normalised(vectors: mx.array) -> mx.array:
    norm = mx.sqrt(mx.sum(mx.square(vectors), axis=-1, keepdims=True))
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
