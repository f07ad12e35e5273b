"""Rows of latent attention (MLA): packed latents, and the rotary part of each key as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .. import fast
from ..operations.buffers import assigned, capacity_for, gathered, grown, in_use, written
from ..operations.cache_requests import RankName
from .packing import Packing, each, triple, unpack
from .storage import Layout, Packed, Ranks, Storage, Stored

__all__ = ["LatentRowStore"]


class LatentRowStore(Storage):
    """``keys`` are latents, quantised once; ``values`` are rotary parts, dense.

    A decoded token's attention reads the latents as keys and as values, so it takes them packed;
    models multiply the latents of a chunk, and the rotary parts always, so those are arrays.
    """

    by_slot = True

    def __init__(
        self,
        keys: Packed,
        values: mx.array,
        importance: mx.array,
        positions: mx.array,
        packing: Packing,
    ) -> None:
        batch, heads, _, groups = keys[1].shape
        layout = Layout(batch, heads, groups * packing.group_size, keys[1].dtype)
        super().__init__(layout, Layout.of(values), importance, positions)
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
    ) -> LatentRowStore:
        """The rows of a dense store, their latents quantised."""
        return cls(packing.packed_keys(keys), values, importance, positions, packing)

    @classmethod
    def empty_like(cls, keys: mx.array, values: mx.array, packing: Packing) -> LatentRowStore:
        """No rows yet, for rows of these shapes and dtypes."""
        heads = keys.shape[:2]
        packed = packing.packed_keys(mx.zeros((*heads, 1, keys.shape[3]), keys.dtype))
        return cls(
            each(lambda part: part[:, :, :0], packed),
            mx.zeros((*heads, 0, values.shape[3]), values.dtype),
            mx.zeros((*heads, 0), mx.float32),
            mx.zeros((*heads, 0), mx.int32),
            packing,
        )

    @property
    def attention_settings(self) -> dict[str, Any]:
        # The values of attention are the latents.
        return self.packing._replace(v_bits=self.packing.bits)._asdict()

    def arrays(self) -> list[mx.array]:
        return [*self.keys, self.values]

    def fetch(self) -> tuple[Packed, mx.array]:
        """The rows in use, views where possible."""
        end = self.length
        return each(lambda part: in_use(part, end), self.keys), in_use(self.values, end)

    def hands_arrays(self, queries: int) -> bool:
        return queries > 1

    def handed(self, queries: int) -> tuple[Stored, Stored]:
        return self.dense() if self.hands_arrays(queries) else self.fetch()

    def dense(self) -> tuple[mx.array, mx.array]:
        keys, values = self.fetch()
        return unpack(keys, self.packing.bits, self.packing.group_size), values

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
        packed = self.packing.packed_keys(keys)
        if end > min(self.keys[0].shape[2], self.values.shape[2]):
            capacity = capacity_for(end, limit)
            parts = zip(self.keys, packed, strict=True)
            self.keys = triple(grown(stored, start, new, capacity) for stored, new in parts)
            self.values = grown(self.values, start, values, capacity)
        else:
            parts = zip(self.keys, packed, strict=True)
            self.keys = triple(assigned(stored, start, new) for stored, new in parts)
            self.values = assigned(self.values, start, values)
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
        self._cut()
        slots = fast.evict_indices(
            self.ranked(ranks, position),
            self.positions,
            count=1,
            sink_size=sink_size,
            recent_start=recent_start,
        )
        self.write(keys, values, slots)
        self.importance = mx.put_along_axis(self.importance, slots, mx.array(mx.nan), axis=2)
        place = mx.array(position, mx.int32)
        self.positions = mx.put_along_axis(self.positions, slots, place, axis=2)
        self.tied = False

    def write(self, keys: mx.array, values: mx.array, slots: mx.array) -> None:
        parts = zip(self.keys, self.packing.packed_keys(keys), strict=True)
        self.keys = triple(written(stored, slots, new) for stored, new in parts)
        self.values = written(self.values, slots, values)

    def _stored(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        return [*self.packing.packed_keys(keys), values]

    def _rebind(self, arrays: list[mx.array]) -> None:
        self.keys, self.values = triple(arrays[:3]), arrays[3]

    def keep(self, slots: mx.array, *, ranks: mx.array | None = None, added: int = 0) -> mx.array:
        self.keys = each(lambda part: gathered(part, slots), self.keys)
        self.values = gathered(self.values, slots)
        self._keep_remembered(slots)
        return slots

    def replace_keys(self, keys: Any) -> None:
        stored = self.fetch()[0]
        self._check("keys", list(keys), list(stored))
        self.keys = triple(keys)

    def replace_values(self, values: Any) -> None:
        self._check("values", [values], [self.fetch()[1]])
        self.values = values

    def _check(self, name: str, found: Sequence[mx.array], stored: Sequence[mx.array]) -> None:
        shapes = [(part.shape, part.dtype) for part in found]
        expected = [(part.shape, part.dtype) for part in stored]
        if shapes != expected:
            raise ValueError(f"[H2OKVCache.{name}] found {shapes}, expected {expected}.")

    def _cut(self) -> None:
        """Give up the unused rows."""
        if self.values.shape[2] != self.length or self.keys[0].shape[2] != self.length:
            self.keys, self.values = self.fetch()
