"""Functions of ranks and weights that several policies share. Not a policy itself."""

from typing import Any

import mlx.core as mx

from ..operations import composed
from ..operations.backends import resolve
from .base import Rows


def best(rows: Rows, ranks: mx.array, keep: int) -> mx.array:
    """Slots of the protected rows and of those with the highest ranks, uint32 [B, H, keep],
    ascending."""
    protected: Any = {"sink_size": rows.sink_size, "recent_start": rows.recent_start}
    return resolve().keep_indices(ranks, rows.positions, keep=keep, **protected)


def order(values: mx.array, positions: mx.array) -> mx.array:
    """The place of each row among its head's, 0 (least) to N - 1, float32 [B, H, N].

    Among equal values the lower position ranks higher, whatever the slots, as in evictions.
    O(N log N) per head.
    """
    key = composed.retention_key(values, positions)
    return mx.argsort(mx.argsort(key, axis=2), axis=2).astype(mx.float32)


def greatest_near(rows: mx.array, positions: mx.array | None, first: int, last: int) -> mx.array:
    """For each row, the greatest of ``rows`` [B, H, N] from ``first`` to ``last`` places after it,
    by position. ``positions`` None: slots are in order."""
    if positions is not None:
        order = mx.argsort(positions, axis=2)
        near = greatest_near(mx.take_along_axis(rows, order, axis=2), None, first, last)
        return mx.put_along_axis(rows, order, near, axis=2)
    padded = mx.pad(rows, [(0, 0), (0, 0), (-first, last)], constant_values=-mx.inf)
    result = rows
    for start in range(last - first + 1):
        result = mx.maximum(result, padded[:, :, start : start + rows.shape[2]])
    return result
