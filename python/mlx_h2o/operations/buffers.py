"""Arrays [B, H, capacity, width] whose first rows are in use: growth, assignment, slots.

Nothing changes an array that was passed; all results are new objects.
"""

from __future__ import annotations

import mlx.core as mx

__all__ = ["assigned", "capacity_for", "exchanged", "gathered", "grown", "in_use", "written"]

_STEP = 256


def capacity_for(end: int, limit: int) -> int:
    """Rows to make room for where ``end`` are needed, and no more than ``limit`` in advance."""
    return max(end, min(-(-end // _STEP) * _STEP, limit))


def grown(buffer: mx.array, used: int, rows: mx.array, capacity: int) -> mx.array:
    """The first ``used`` rows, then ``rows``, then room up to ``capacity``."""
    room = capacity - used - rows.shape[2]
    unused = mx.zeros((*rows.shape[:2], room, rows.shape[3]), rows.dtype)
    parts = [buffer[:, :, :used], rows, unused]
    return mx.concatenate([part for part in parts if part.shape[2]], axis=2)


def assigned(buffer: mx.array, start: int, rows: mx.array) -> mx.array:
    """``rows`` in the slots from ``start`` on, in place where nothing else holds the buffer."""
    result = buffer[...]  # an object of our own: assignment rebinds the object it is made on
    result[:, :, start : start + rows.shape[2]] = rows
    return result


def gathered(buffer: mx.array, slots: mx.array) -> mx.array:
    """The rows at ``slots`` [B, H, n]."""
    return mx.take_along_axis(buffer, _wide(slots, buffer), axis=2)


def written(buffer: mx.array, slots: mx.array, rows: mx.array) -> mx.array:
    """``rows`` [B, H, n, width] at ``slots`` [B, H, n], in place where nothing else holds it."""
    return mx.put_along_axis(buffer, _wide(slots, buffer), rows, axis=2)


def exchanged(array: mx.array, source: mx.array, target: mx.array, *, axis: int) -> mx.array:
    """What is at the indices ``source`` along ``axis`` is at ``target`` too."""
    found = mx.take_along_axis(array, source, axis=axis)
    return mx.put_along_axis(array, target, found, axis=axis)


def in_use(buffer: mx.array, length: int) -> mx.array:
    """The first ``length`` rows, always a new array object: a view where possible."""
    return buffer[...] if buffer.shape[2] == length else buffer[:, :, :length]


def _wide(slots: mx.array, buffer: mx.array) -> mx.array:
    return mx.broadcast_to(mx.expand_dims(slots, -1), (*slots.shape, buffer.shape[3]))
