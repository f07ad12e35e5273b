"""Rows of one layer, each quantised once, when it comes, straight into its slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .. import fast
from ..operations.buffers import capacity_for, gathered, grown, in_use
from ..operations.cache_requests import RankName, ReplaceRequest
from ..operations.replacement import serve_replacement
from .packing import Packing, each, triple
from .storage import DECODE_QUERIES, Packed, Ranks, Storage

__all__ = ["ArrayHandingStore", "QuantizedRowStore"]


class QuantizedRowStore(Storage):
    """Packed rows: words, scales and biases of keys, and of values, [B, H, capacity, ...] each.

    Rows are moved as they are packed. What attention sees is always what is stored, so a
    sequence gives the same output however it is cut into updates.
    """

    takes_known = True
    by_slot = True

    def __init__(
        self,
        keys: Packed,
        values: Packed,
        importance: mx.array,
        positions: mx.array,
        packing: Packing,
    ) -> None:
        super().__init__(*packing.layouts(keys, values), importance, positions)
        self.keys = keys
        self.values = values
        self.packing = packing

    @classmethod
    def of_rows(
        cls,
        keys: mx.array,
        values: mx.array,
        importance: mx.array,
        positions: mx.array,
        packing: Packing,
    ) -> QuantizedRowStore:
        """The rows of a dense store, quantised."""
        return cls(*packing.packed(keys, values), importance, positions, packing)

    @classmethod
    def empty_like(cls, keys: mx.array, values: mx.array, packing: Packing) -> QuantizedRowStore:
        """No rows yet, for rows of these shapes and dtypes."""
        heads = keys.shape[:2]
        remembered = mx.zeros((*heads, 0), mx.float32), mx.zeros((*heads, 0), mx.int32)
        packed = packing.packed(
            mx.zeros((*heads, 1, keys.shape[3]), keys.dtype),
            mx.zeros((*heads, 1, values.shape[3]), values.dtype),
        )
        k, v = (each(lambda part: part[:, :, :0], rows) for rows in packed)
        return cls(k, v, *remembered, packing)

    @property
    def attention_settings(self) -> dict[str, Any]:
        return self.packing._asdict()

    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values]

    def fetch(self) -> tuple[Packed, Packed]:
        """The rows in use, views where possible."""
        end = self.length
        return (
            each(lambda part: in_use(part, end), self.keys),
            each(lambda part: in_use(part, end), self.values),
        )

    def hands_arrays(self, queries: int) -> bool:
        return queries > DECODE_QUERIES

    def handed(self, queries: int) -> tuple[Packed, Packed] | tuple[mx.array, mx.array]:
        return self.dense() if self.hands_arrays(queries) else self.fetch()

    def dense(self) -> tuple[mx.array, mx.array]:
        return self.packing.unpacked(*self.fetch())

    def append(
        self,
        keys: mx.array,
        values: mx.array,
        offset: int,
        limit: int,
        ranks: Ranks | None = None,
    ) -> None:
        start, added = self.length, keys.shape[2]
        end = start + added
        if end > self.keys[0].shape[2]:
            capacity = capacity_for(end, limit)
            k, v = self.packing.packed(keys, values)
            self.keys = _grown(self.keys, start, k, capacity)
            self.values = _grown(self.values, start, v, capacity)
        else:
            slots = mx.arange(start, end, dtype=mx.uint32)
            self.write(keys, values, mx.broadcast_to(slots, keys.shape[:3]))
        self._remember_unscored(added, offset)

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
        if self.keys[0].shape[2] != self.length:
            self.keys, self.values = self.fetch()
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
            **self.packing._asdict(),
        )
        self.keys, self.values, self.importance, self.positions, *kept = serve_replacement(request)
        self.key_statistics = (kept[0], kept[1]) if kept else None
        self.tied = True

    def write(self, keys: mx.array, values: mx.array, slots: mx.array) -> None:
        self._make_room(max(part.shape[2] for part in self.arrays()))  # one side may have been set
        self.keys, self.values = fast.quantize_append(
            self.keys, self.values, keys, values, slots, **self.packing._asdict()
        )

    def _stored(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        packed_keys, packed_values = self.packing.packed(keys, values)
        return [*packed_keys, *packed_values]

    def _rebind(self, arrays: list[mx.array]) -> None:
        self.keys, self.values = triple(arrays[:3]), triple(arrays[3:])

    def keep(self, slots: mx.array, *, ranks: mx.array | None = None, added: int = 0) -> mx.array:
        self.keys = each(lambda part: gathered(part, slots), self.keys)
        self.values = each(lambda part: gathered(part, slots), self.values)
        self._keep_remembered(slots)
        return slots

    def replace_keys(self, keys: Any) -> None:
        self.keys = self._checked("keys", keys, self.fetch()[0])

    def replace_values(self, values: Any) -> None:
        self.values = self._checked("values", values, self.fetch()[1])

    def _checked(self, name: str, found: Sequence[mx.array], stored: Packed) -> Packed:
        expected = [(part.shape, part.dtype) for part in stored]
        shapes = [(part.shape, part.dtype) for part in found]
        if shapes != expected:
            raise ValueError(
                f"[H2OKVCache.{name}] found {shapes}, expected words, scales and biases as "
                f"stored: {expected}."
            )
        return triple(found)


class ArrayHandingStore(QuantizedRowStore):
    """Packed rows of a model that computes with the keys before it attends: it gets arrays."""

    def hands_arrays(self, queries: int) -> bool:
        return True


def _grown(stored: Packed, used: int, new: Packed, capacity: int) -> Packed:
    pairs = zip(stored, new, strict=True)
    return triple(grown(buffer, used, rows, capacity) for buffer, rows in pairs)
