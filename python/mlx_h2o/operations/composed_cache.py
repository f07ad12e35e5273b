"""The definitions of the operations on a cache's rows, in plain MLX operations.

Part of the composed back end: what the other back ends are compared with.
"""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from mlx_h2o.operations import buffers, composed, ema
from mlx_h2o.operations.cache_requests import (
    AccumulateRequest,
    KeyDiversityRequest,
    ReplaceRequest,
)
from mlx_h2o.operations.key_statistics import LEAST_NORM, dense_rows, inverse_norms_of
from mlx_h2o.operations.placement import placed
from mlx_h2o.operations.replace_requests import Packed, Statistics, as_packed
from mlx_h2o.operations.validate import RetentionRequest

Stored = mx.array | Packed


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
    return vectors / mx.maximum(norm, LEAST_NORM)


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
        keys = dense_rows(request.keys, request.bits, request.group_size)
        return key_diversity(KeyDiversityRequest(keys))
    return request.importance


def retention_of(request: ReplaceRequest) -> RetentionRequest:
    """The choice of the row that ``replace_worst`` replaces."""
    with placed(request.stream):
        ranks = ranks_of(request)
    zones = request.sink_size, request.recent_start
    return RetentionRequest(ranks, request.positions, 1, *zones, request.stream)


def replace_worst(request: ReplaceRequest) -> tuple[Any, ...]:
    """Keys, values, importance and positions with the new row in place of the worst, and the
    statistics where they were given."""
    return written(request, slots_of(request, composed.evict_indices))


def slots_of(request: ReplaceRequest, choose: Callable[[RetentionRequest], mx.array]) -> mx.array:
    """The slots of the rows that go, uint32 [B, H, 1]: those that are known, or chosen."""
    if request.worst is None:
        return choose(retention_of(request))
    with placed(request.stream):
        # A slot beyond the end is the last: nothing writes out of bounds.
        last = mx.array(request.positions.shape[2] - 1, mx.uint32)
        return mx.expand_dims(mx.minimum(request.worst, last), -1)


def written(request: ReplaceRequest, slots: mx.array) -> tuple[Any, ...]:
    """The same with the new row at ``slots`` [B, H, 1]."""
    new = new_rows(request)
    updated: tuple[mx.array, ...] = ()
    if request.statistics is not None:
        updated = updated_statistics(request, request.statistics, slots, new[0])
    return replaced(request, slots, new, (*marked(request, slots), *updated))


def new_rows(request: ReplaceRequest) -> tuple[Stored, Stored]:
    """The new key and value as they are stored."""
    if not request.is_packed:
        return request.new_keys, request.new_values
    with placed(request.stream):
        size = request.group_size
        keys = mx.quantize(request.new_keys, group_size=size, bits=request.bits)
        values = mx.quantize(request.new_values, group_size=size, bits=request.v_bits)
    return as_packed(keys), as_packed(values)


def marked(request: ReplaceRequest, slots: mx.array) -> tuple[mx.array, mx.array]:
    """Importance and positions with the new row at ``slots``."""
    with placed(request.stream):
        nan, position = mx.array(mx.nan), mx.array(request.position, mx.int32)
        importance = mx.put_along_axis(request.importance, slots, nan, axis=2)
        return importance, mx.put_along_axis(request.positions, slots, position, axis=2)


def replaced(
    request: ReplaceRequest,
    slots: mx.array,
    new: tuple[Stored, Stored],
    others: tuple[mx.array, ...],
) -> tuple[Any, ...]:
    """Keys and values with the new row, as it is stored, at ``slots``, then the ``others``."""
    with placed(request.stream):
        keys = [buffers.written(old, slots, part) for old, part in _pairs(request.keys, new[0])]
        values = [buffers.written(old, slots, part) for old, part in _pairs(request.values, new[1])]
        # Whoever evaluates the keys evaluates these too: else the graph of every step would
        # hang on them.
        keys[0] = mx.depends(keys[0], [*keys[1:], *values, *others])
    return _stored(keys), _stored(values), *others


def updated_statistics(
    request: ReplaceRequest, statistics: Statistics, slots: mx.array, new_keys: Stored
) -> Statistics:
    """The statistics with the row at ``slots`` gone and the new key, as it is stored, in it."""
    key_sum, inverse_norms = statistics
    packing = request.bits, request.group_size
    with placed(request.stream):
        rows = [buffers.gathered(part, slots) for part in _parts(request.keys)]
        old = dense_rows(_stored(rows), *packing)
        new = dense_rows(new_keys, *packing)
        old_norms = mx.take_along_axis(inverse_norms, slots, axis=2)
        new_norms = inverse_norms_of(new)
        change = new * mx.expand_dims(new_norms, -1) - old * mx.expand_dims(old_norms, -1)
        norms = mx.put_along_axis(inverse_norms, slots, new_norms, axis=2)
        return key_sum + change[:, :, 0], norms


def _parts(rows: Stored) -> tuple[mx.array, ...]:
    return rows if isinstance(rows, tuple) else (rows,)


def _stored(parts: list[mx.array]) -> Stored:
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else parts[0]


def _pairs(stored: Stored, new: Stored) -> Iterator[tuple[mx.array, mx.array]]:
    return zip(_parts(stored), _parts(new), strict=True)
