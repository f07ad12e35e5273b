"""The definitions of the operations on a cache's rows, in plain MLX operations.

Part of the composed back end: what the other back ends are compared with.
"""

import mlx.core as mx

from mlx_h2o import composed, ema
from mlx_h2o.cache_requests import AccumulateRequest, KeyDiversityRequest, ReplaceRequest
from mlx_h2o.placement import placed
from mlx_h2o.validate import RetentionRequest

_LEAST_NORM = 1e-12  # a key of zeros gets the cosine 0, not NaN


def accumulate_scores(request: AccumulateRequest) -> mx.array:
    """The moving average as ``ema`` defines it."""
    with placed(request.stream):
        return ema.accumulate(
            request.importance, request.scores, decay=request.decay, masked=request.masked
        )


def key_diversity(request: KeyDiversityRequest) -> mx.array:
    """Minus the cosine of each key with the mean of the normalised keys of its head."""
    with placed(request.stream):
        directions = _normalised(request.keys.astype(mx.float32))
        mean = _normalised(mx.mean(directions, axis=2, keepdims=True))
        return -mx.squeeze(directions @ mx.swapaxes(mean, -1, -2), -1)


def _normalised(vectors: mx.array) -> mx.array:
    norm = mx.sqrt(mx.sum(mx.square(vectors), axis=-1, keepdims=True))
    return vectors / mx.maximum(norm, _LEAST_NORM)


def ages(positions: mx.array, position: int) -> mx.array:
    """The rank "age", float32: the oldest row is the lowest.

    The age, not the position: float32 holds every age in a cache, but not every position of a
    sequence beyond 2^24 tokens.
    """
    return (positions - position).astype(mx.float32)


def ranks_of(request: ReplaceRequest) -> mx.array:
    """What ``replace_worst`` ranks rows by, float32 [B, H, N]."""
    if isinstance(request.ranks, mx.array):
        return request.ranks
    if request.ranks == "age":
        return ages(request.positions, request.position)
    if request.ranks == "key_diversity":
        return key_diversity(KeyDiversityRequest(request.keys))
    return request.importance


def retention_of(request: ReplaceRequest) -> RetentionRequest:
    """The choice of the row that ``replace_worst`` replaces."""
    with placed(request.stream):
        ranks = ranks_of(request)
    zones = request.sink_size, request.recent_start
    return RetentionRequest(ranks, request.positions, 1, *zones, request.stream)


def replace_worst(request: ReplaceRequest) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Keys, values, importance and positions with the new row in place of the worst."""
    return written(request, composed.evict_indices(retention_of(request)))


def written(
    request: ReplaceRequest, slots: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Keys, values, importance and positions with the new row at ``slots`` [B, H, 1]."""
    with placed(request.stream):
        nan = mx.array(mx.nan)
        position = mx.array(request.position, mx.int32)
        importance = mx.put_along_axis(request.importance, slots, nan, axis=2)
        positions = mx.put_along_axis(request.positions, slots, position, axis=2)
    return replaced(request, slots, importance, positions)


def replaced(
    request: ReplaceRequest, slots: mx.array, importance: mx.array, positions: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The same where importance and positions have been written: a scatter of keys and values."""
    with placed(request.stream):
        keys = _scattered(request.keys, slots, request.new_keys)
        values = _scattered(request.values, slots, request.new_values)
        # Whoever evaluates the keys evaluates these too: else the graph of every step would
        # hang on them.
        return mx.depends(keys, [importance, positions]), values, importance, positions


def _scattered(buffer: mx.array, slots: mx.array, rows: mx.array) -> mx.array:
    slots = mx.broadcast_to(mx.expand_dims(slots, -1), (*slots.shape, buffer.shape[3]))
    return mx.put_along_axis(buffer, slots, rows, axis=2)
