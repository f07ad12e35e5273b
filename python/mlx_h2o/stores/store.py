"""Rows of one layer as they come: keys and values with room to grow."""

from __future__ import annotations

import mlx.core as mx

from ..operations.buffers import assigned, capacity_for, gathered, grown, in_use
from ..operations.cache_requests import RankName, ReplaceRequest
from ..operations.replacement import serve_replacement
from .storage import Layout, Ranks, Storage

__all__ = ["RowStore"]


class RowStore(Storage):
    """Dense rows.

    ``keys`` [B, H, capacity, D] and ``values`` [B, H, capacity, Dv] have unused rows at their
    end; ``importance`` and ``positions`` have none.
    """

    takes_known = True
    by_slot = True

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        importance: mx.array,
        positions: mx.array,
    ) -> None:
        super().__init__(Layout.of(keys), Layout.of(values), importance, positions)
        self.keys = keys
        self.values = values

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

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    def fetch(self) -> tuple[mx.array, mx.array]:
        """The rows in use: [B, H, length, D] and [B, H, length, Dv], views where possible."""
        end = self.length
        return in_use(self.keys, end), in_use(self.values, end)

    def handed(self, queries: int) -> tuple[mx.array, mx.array]:
        return self.fetch()

    def dense(self) -> tuple[mx.array, mx.array]:
        return self.fetch()

    def append(
        self,
        keys: mx.array,
        values: mx.array,
        offset: int,
        limit: int,
        ranks: Ranks | None = None,
    ) -> None:
        start = self.length
        end = start + keys.shape[2]
        if end > min(self.keys.shape[2], self.values.shape[2]):
            capacity = capacity_for(end, limit)
            self.keys = grown(self.keys, start, keys, capacity)
            self.values = grown(self.values, start, values, capacity)
        else:
            self.keys = assigned(self.keys, start, keys)
            self.values = assigned(self.values, start, values)
        self._remember_unscored(keys.shape[2], offset)

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
            worst=self.known_worst(sink_size, recent_start, ranks),
            statistics=self.key_statistics,
        )
        self.keys, self.values, self.importance, self.positions, *kept = serve_replacement(request)
        self.key_statistics = (kept[0], kept[1]) if kept else None
        self.tied = True

    def _stored(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        return [keys, values]

    def _rebind(self, arrays: list[mx.array]) -> None:
        self.keys, self.values = arrays

    def keep(self, slots: mx.array, *, ranks: mx.array | None = None, added: int = 0) -> mx.array:
        self.keys = gathered(self.keys, slots)
        self.values = gathered(self.values, slots)
        self._keep_remembered(slots)
        return slots

    def replace_keys(self, keys: mx.array) -> None:
        self._check("keys", keys, self.key_layout)
        self.keys = keys

    def replace_values(self, values: mx.array) -> None:
        self._check("values", values, self.value_layout)
        self.values = values

    def _check(self, name: str, array: mx.array, layout: Layout) -> None:
        if array.ndim != 4 or array.shape[2] != self.length or Layout.of(array) != layout:
            raise ValueError(
                f"[H2OKVCache.{name}] found {array.dtype} {array.shape}, "
                f"expected {self.length} rows and {layout}."
            )

    def _cut(self) -> None:
        """Give up the unused rows."""
        end = self.length
        if self.keys.shape[2] != end or self.values.shape[2] != end:
            self.keys, self.values = self.fetch()
