"""The definitions of the operations on a cache's rows, in plain MLX operations.

Part of the composed back end: what the other back ends are compared with.
"""

from collections.abc import Iterator, Sequence

import mlx.core as mx

from mlx_h2o.operations import buffers, composed, ema, turbo
from mlx_h2o.operations.placement import placed
from mlx_h2o.operations.requests import (
    AccumulateRequest,
    KeyDiversityRequest,
    Packed,
    Parts,
    PerSequence,
    QuantizeAppendRequest,
    QuantizedRows,
    ReplaceRequest,
    RetentionRequest,
)

Stored = mx.array | Packed
Replaced = tuple[Stored, Stored, mx.array, mx.array]

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


def ages(positions: mx.array, position: PerSequence) -> mx.array:
    """The rank "age", float32: the oldest row is the lowest.

    The age, not the position: float32 holds every age in a cache, but not every position of a
    sequence beyond 2^24 tokens.
    """
    return (positions - composed.beside_rows(position)).astype(mx.float32)


def ranks_of(request: ReplaceRequest) -> mx.array:
    """What ``replace_worst`` ranks rows by, float32 [B, H, N]."""
    if isinstance(request.ranks, mx.array):
        return request.ranks
    if request.ranks == "age":
        return ages(request.positions, request.position)
    if request.ranks == "key_diversity":
        keys = request.keys
        if isinstance(keys, tuple):
            keys = composed.dense(QuantizedRows(*keys, request.bits, request.group_size))
        return key_diversity(KeyDiversityRequest(keys))
    return request.importance


def retention_of(request: ReplaceRequest) -> RetentionRequest:
    """The choice of the row that ``replace_worst`` replaces."""
    with placed(request.stream):
        ranks = ranks_of(request)
    zones = request.sink_size, request.recent_start
    return RetentionRequest(ranks, request.positions, 1, *zones, request.stream)


def replace_worst(request: ReplaceRequest) -> Replaced:
    """Keys, values, importance and positions with the new row in place of the worst."""
    slots = composed.evict_indices(retention_of(request))
    return replaced(request, slots, new_rows(request), marked(request, slots))


def new_rows(request: ReplaceRequest) -> tuple[Stored, Stored]:
    """The new key and value as they are stored."""
    if not request.is_packed:
        return request.new_keys, request.new_values
    with placed(request.stream):
        size = request.group_size
        keys = mx.quantize(request.new_keys, group_size=size, bits=request.bits)
        values = mx.quantize(request.new_values, group_size=size, bits=request.v_bits)
    return _stored(keys), _stored(values)


def marked(request: ReplaceRequest, slots: mx.array) -> tuple[mx.array, mx.array]:
    """Importance and positions with the new row at ``slots``."""
    with placed(request.stream):
        nan = mx.array(mx.nan)
        position = composed.beside_rows(request.position)
        if isinstance(position, int):
            position = mx.array(position, mx.int32)
        importance = mx.put_along_axis(request.importance, slots, nan, axis=2)
        position = mx.broadcast_to(position, slots.shape)
        return importance, mx.put_along_axis(request.positions, slots, position, axis=2)


def replaced(
    request: ReplaceRequest,
    slots: mx.array,
    new: tuple[Stored, Stored],
    others: tuple[mx.array, mx.array],
) -> Replaced:
    """Keys and values with the new row, as it is stored, at ``slots``, then the ``others``."""
    with placed(request.stream):
        keys = [buffers.put_rows(old, slots, part) for old, part in _pairs(request.keys, new[0])]
        values = [
            buffers.put_rows(old, slots, part) for old, part in _pairs(request.values, new[1])
        ]
        # Whoever evaluates the keys evaluates these too: else the graph of every step would
        # hang on them.
        keys[0] = mx.depends(keys[0], [*keys[1:], *values, *others])
    return _stored(keys), _stored(values), *others


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


def _parts(rows: Stored) -> tuple[mx.array, ...]:
    return rows if isinstance(rows, tuple) else (rows,)


def _stored(parts: Sequence[mx.array]) -> Stored:
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else parts[0]


def _pairs(stored: Stored, new: Stored) -> Iterator[tuple[mx.array, mx.array]]:
    return zip(_parts(stored), _parts(new), strict=True)
