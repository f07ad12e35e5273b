"""What the queries of provisional tokens say of the stored rows, until they are committed."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..operations.buffers import exchanged

__all__ = ["Aside", "taken"]


class Aside(NamedTuple):
    """What queries that are not committed say: as ``Policy.accumulate`` takes it.

    start: position of the first query.
    seen: float32 [B, Hq, queries, slots]. What it has for a row of a later position means nothing:
        such rows lie in later slots, or in those of rows that went.
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
        if (low, high) == (self.start, self.stop):
            return self
        part = self.seen[:, :, low - self.start : high - self.start]
        return self._replace(start=low, seen=part)

    def wide(self, slots: int) -> mx.array:
        """``seen`` for so many slots."""
        missing = slots - self.seen.shape[3]
        if missing <= 0:
            return self.seen[:, :, :, :slots] if missing else self.seen
        more = mx.full((*self.seen.shape[:3], missing), self.unseen, self.seen.dtype)
        return mx.concatenate([self.seen, more], axis=3)

    def visible(self, own: mx.array) -> mx.array:
        """``seen`` for the slots of bool ``own`` [B, H, slots]; the others are unseen."""
        seen = self.wide(own.shape[2])
        own = mx.repeat(own, seen.shape[1] // own.shape[1], axis=1)
        return mx.where(mx.expand_dims(own, 2), seen, self.unseen)

    def moved(self, slots: mx.array, length: int) -> Aside:
        """Of rows that move: that in slot ``slots[i]`` of ``length`` goes to slot i."""
        seen = self.wide(length)
        return self._replace(seen=mx.take_along_axis(seen, self._of_queries(slots), axis=3))

    def exchanged(self, source: mx.array, target: mx.array, length: int) -> Aside:
        """Of rows that move: those in ``source`` [B, H, n] of ``length`` go to ``target``."""
        seen, places = self.wide(length), (self._of_queries(source), self._of_queries(target))
        return self._replace(seen=exchanged(seen, *places, axis=3))

    def _of_queries(self, slots: mx.array) -> mx.array:
        """``slots`` [B, H, n] for each query: [B, Hq, queries, n]."""
        batch, heads, queries, _ = self.seen.shape
        slots = mx.repeat(slots, heads // slots.shape[1], axis=1)
        return mx.broadcast_to(mx.expand_dims(slots, 2), (batch, heads, queries, slots.shape[2]))


def taken(array: mx.array, slots: mx.array) -> mx.array:
    """The rows at ``slots`` [B, H, n] of an array [B, H, rows, ...]."""
    for _ in range(array.ndim - 3):
        slots = mx.expand_dims(slots, -1)
    return mx.take_along_axis(array, slots, axis=2)
