"""What is kept of provisional tokens: what their queries say, and how things stood before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from ..stores.storage import Storage

__all__ = ["Aside", "Before", "arrays_of", "bytes_of", "taken"]


class Aside(NamedTuple):
    """What queries that are not committed say: as ``Policy.accumulate`` takes it.

    start: position of the first query.
    seen: float32 [B, Hq, queries, slots]; later slots were not seen.
    unseen: what stands for a row that a query does not see.
    """

    start: int
    seen: mx.array
    unseen: float

    @property
    def stop(self) -> int:
        return self.start + self.seen.shape[2]

    def part(self, start: int, stop: int) -> Aside | None:
        """Of the queries from ``start`` up to ``stop``, or None."""
        low, high = max(start, self.start), min(stop, self.stop)
        if low >= high:
            return None
        part = self.seen[:, :, low - self.start : high - self.start]
        return self._replace(start=low, seen=part)

    def wide(self, slots: int) -> mx.array:
        """``seen`` for so many slots."""
        missing = slots - self.seen.shape[3]
        if missing <= 0:
            return self.seen[:, :, :, :slots]
        more = mx.full((*self.seen.shape[:3], missing), self.unseen, self.seen.dtype)
        return mx.concatenate([self.seen, more], axis=3)

    def moved(self, slots: mx.array, length: int) -> Aside:
        """Of rows that move: that in slot ``slots[i]`` of ``length`` goes to slot i."""
        seen = self.wide(length)
        index = mx.repeat(slots, seen.shape[1] // slots.shape[1], axis=1)[:, :, None]
        index = mx.broadcast_to(index, (*seen.shape[:3], slots.shape[2]))
        return self._replace(seen=mx.take_along_axis(seen, index, axis=3))


class Before(NamedTuple):
    """How things stood before an update, less the keys and values that are still stored.

    gone: the rows that the update evicted.
    """

    offset: int
    frontier: int
    evicted: int
    positions: mx.array
    importance: mx.array
    asides: tuple[Aside, ...]
    gone: tuple[Storage, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes kept, those of asides excepted that are still waiting."""
        held = sum(bytes_of(arrays_of(gone)) for gone in self.gone)
        return self.positions.nbytes + self.importance.nbytes + held


def arrays_of(store: Storage) -> list[mx.array]:
    """Every array of a store."""
    leaves: Any = tree_flatten([*store.fetch(), store.positions])
    return [array for _, array in leaves]


def bytes_of(arrays: Sequence[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)


def taken(array: mx.array, slots: mx.array) -> mx.array:
    """The rows at ``slots`` [B, H, n] of an array [B, H, rows, ...]."""
    for _ in range(array.ndim - 3):
        slots = mx.expand_dims(slots, -1)
    return mx.take_along_axis(array, slots, axis=2)
