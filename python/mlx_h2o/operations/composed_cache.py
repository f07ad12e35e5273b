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


def add_mass(importance: mx.array, scores: mx.array, lse: mx.array) -> mx.array:
    """``importance`` [B, H, N] plus the weights ``exp(scores - lse)`` that all queries and query
    heads of a KV head give to each row; NaN, of a row that is not scored, counts as 0.

    Args:
        importance: float32 [B, H, N or more], of which the others stay as they are.
        scores: float32 [B, Hq, L, N].
        lse: float32 [B, Hq, L]; a query that sees nothing, -inf, adds nothing.
    """
    batch, heads, room = importance.shape
    rows = scores.shape[3]
    lse = mx.where(lse == -mx.inf, mx.inf, lse)[..., None]
    mass = mx.sum(mx.exp(scores - lse).reshape(batch, heads, -1, rows), axis=2)
    part = importance if room == rows else importance[:, :, :rows]
    found = mx.where(mx.isnan(part), 0.0, part) + mass
    return found if room == rows else mx.slice_update(importance, found, mx.array([0]), [2])


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
