"""Rows of one layer: keys and values with room to grow, and what is remembered of each row.

Every update rebinds the arrays to new graph nodes and keeps no other reference, so that MLX can
reuse their buffers; an array object that someone else may hold never changes. Nothing is
evaluated here.
"""

from __future__ import annotations

import mlx.core as mx

from .cache_operations import serve_replacement
from .cache_requests import RankName, ReplaceRequest

__all__ = ["RowStore"]

_STEP = 256


class RowStore:
    """``length`` rows in each of B x H heads.

    ``keys`` [B, H, capacity, D] and ``values`` [B, H, capacity, Dv] have unused rows at their
    end; ``importance`` float32 [B, H, length] and ``positions`` int32 [B, H, length] have none.
    """

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        importance: mx.array,
        positions: mx.array,
    ) -> None:
        self.keys = keys
        self.values = values
        self.importance = importance
        self.positions = positions
        self.tied = False
        """Whether evaluating the keys evaluates importance and positions too."""

    @classmethod
    def empty_like(cls, keys: mx.array, values: mx.array) -> RowStore:
        """No rows yet, for rows of these shapes and dtypes."""
        heads = keys.shape[:2]
        return cls(
            mx.zeros((*heads, 0, keys.shape[3]), keys.dtype),
            mx.zeros((*heads, 0, values.shape[3]), values.dtype),
            mx.zeros((*heads, 0), mx.float32),
            mx.zeros((*heads, 0), mx.int32),
        )

    @property
    def length(self) -> int:
        return self.positions.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of every stored array, unused rows included."""
        arrays = (self.keys, self.values, self.importance, self.positions)
        return sum(array.nbytes for array in arrays)

    def fetch(self) -> tuple[mx.array, mx.array]:
        """The rows in use: [B, H, length, D] and [B, H, length, Dv], views where possible."""
        end = self.length
        if self.keys.shape[2] == end == self.values.shape[2]:
            return self.keys[...], self.values[...]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def append(self, keys: mx.array, values: mx.array, offset: int, limit: int) -> None:
        """Add rows behind the others, at positions ``offset`` and up, unscored.

        ``limit`` is the length beyond which no room is made in advance. O(rows added), and
        O(rows stored) once in 256 rows.
        """
        batch, heads, added, _ = keys.shape
        start = self.length
        end = start + added
        self.tied = False
        if end > min(self.keys.shape[2], self.values.shape[2]):
            room = max(end, min(-(-end // _STEP) * _STEP, limit)) - end
            self.keys = _grown(self.keys, start, keys, room)
            self.values = _grown(self.values, start, values, room)
        else:
            self.keys = _assigned(self.keys, start, keys)
            self.values = _assigned(self.values, start, values)
        unscored = mx.full((batch, heads, added), mx.nan, mx.float32)
        positions = mx.arange(offset, offset + added, dtype=mx.int32)
        positions = mx.broadcast_to(positions, (batch, heads, added))
        self.importance = mx.concatenate([self.importance, unscored], axis=2)
        self.positions = mx.concatenate([self.positions, positions], axis=2)

    def replace_worst(
        self,
        keys: mx.array,
        values: mx.array,
        position: int,
        *,
        sink_size: int,
        recent_start: int,
        ranks: mx.array | RankName,
    ) -> None:
        """Write one new row over the worst row of each head: O(1) rows moved.

        As ``fast.replace_worst``, without its checks: the rows are known to fit.
        """
        self._cut()
        request = ReplaceRequest(
            self.keys,
            self.values,
            self.importance,
            self.positions,
            keys,
            values,
            position,
            sink_size,
            recent_start,
            ranks,
        )
        self.keys, self.values, self.importance, self.positions = serve_replacement(request)
        self.tied = True

    def keep(self, slots: mx.array) -> None:
        """Keep only ``slots`` [B, H, n], in that order; no unused rows remain. O(n) rows moved."""
        self.tied = False
        self.keys = _gathered(self.keys, slots)
        self.values = _gathered(self.values, slots)
        self.importance = mx.take_along_axis(self.importance, slots, axis=2)
        self.positions = mx.take_along_axis(self.positions, slots, axis=2)

    def truncate(self, length: int) -> None:
        """Forget the rows from slot ``length`` on; their space stays."""
        self.tied = False
        self.importance = self.importance[:, :, :length]
        self.positions = self.positions[:, :, :length]

    def _cut(self) -> None:
        """Give up the unused rows."""
        end = self.length
        if self.keys.shape[2] != end or self.values.shape[2] != end:
            self.keys, self.values = self.fetch()


def _grown(buffer: mx.array, used: int, rows: mx.array, room: int) -> mx.array:
    shape = (*rows.shape[:2], room, rows.shape[3])
    parts = [buffer[:, :, :used], rows, mx.zeros(shape, rows.dtype)]
    return mx.concatenate([part for part in parts if part.shape[2]], axis=2)


def _assigned(buffer: mx.array, start: int, rows: mx.array) -> mx.array:
    result = buffer[...]  # an object of our own: assignment rebinds the object it is made on
    result[:, :, start : start + rows.shape[2]] = rows
    return result


def _per_column(slots: mx.array, width: int) -> mx.array:
    return mx.broadcast_to(mx.expand_dims(slots, -1), (*slots.shape, width))


def _gathered(buffer: mx.array, slots: mx.array) -> mx.array:
    return mx.take_along_axis(buffer, _per_column(slots, buffer.shape[3]), axis=2)
