"""Rows of one layer in mixed precision: the newest as they come, older ones packed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..operations.backends import operation_of
from ..operations.cache_requests import RankName
from ..operations.tier_requests import TierRequest, TierRows
from .packed_rows import PackedRows, gathered_from
from .packing import Packing, triple
from .storage import Layout, Ranks, Segment, Storage, Stored, tied
from .tier_replacement import serve_tier_replacement
from .tiers import halves, ordered

__all__ = ["MixedRowStore"]


class MixedRowStore(Storage):
    """Slots in order of segments: heavy rows, light rows where there are such, the newest rows.

    At least ``dense_size`` newest rows are dense, in order of position: that many at the budget,
    fewer than twice as many below it, where rows leave in groups. A row is quantised when it
    leaves them, once. Where there are two tiers of packed rows, each head holds half of its
    packed rows in either: the lightest by their rank have fewer bits. A row that sinks into the
    lighter half is cut down to the upper bits of its codes; none ever gains precision.
    """

    in_segments = True

    def __init__(
        self,
        tiers: Sequence[PackedRows],
        keys: mx.array,
        values: mx.array,
        importance: mx.array,
        positions: mx.array,
        dense_size: int,
    ) -> None:
        super().__init__(Layout.of(keys), Layout.of(values), importance, positions)
        self.tiers = list(tiers)
        self.keys = keys
        self.values = values
        self.dense_size = dense_size

    @classmethod
    def empty_like(
        cls, keys: mx.array, values: mx.array, packings: Sequence[Packing], dense_size: int
    ) -> MixedRowStore:
        """No rows yet, for rows of these shapes and dtypes; a tier for each packing."""
        heads = keys.shape[:2]
        return cls(
            [PackedRows.none_like(keys, values, packing) for packing in packings],
            mx.zeros((*heads, 0, keys.shape[3]), keys.dtype),
            mx.zeros((*heads, 0, values.shape[3]), values.dtype),
            mx.zeros((*heads, 0), mx.float32),
            mx.zeros((*heads, 0), mx.int32),
            dense_size,
        )

    @classmethod
    def restored(
        cls,
        keys: Sequence[mx.array],
        values: Sequence[mx.array],
        importance: mx.array,
        positions: mx.array,
        packings: Sequence[Packing],
        dense_size: int,
    ) -> MixedRowStore:
        """The store whose ``fetch`` gave ``keys`` and ``values``."""
        tiers = [
            PackedRows(triple(keys[at : at + 3]), triple(values[at : at + 3]), packing)
            for at, packing in zip(range(0, 3 * len(packings), 3), packings, strict=True)
        ]
        return cls(tiers, keys[-1], values[-1], importance, positions, dense_size)

    @property
    def attention_settings(self) -> dict[str, Any]:
        return self.tiers[0].packing._asdict()

    @property
    def packed_length(self) -> int:
        return sum(tier.length for tier in self.tiers)

    def arrays(self) -> list[mx.array]:
        return [*(part for tier in self.tiers for part in tier.arrays()), self.keys, self.values]

    def fetch(self) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        """Words, scales and biases of each tier, then the newest rows."""
        return (
            (*(part[...] for tier in self.tiers for part in tier.keys), self.keys[...]),
            (*(part[...] for tier in self.tiers for part in tier.values), self.values[...]),
        )

    def handed(self, queries: int) -> tuple[mx.array, mx.array]:
        """Arrays, which nobody computes where attention reads the segments instead."""
        return self.dense()

    def dense(self) -> tuple[mx.array, mx.array]:
        served = operation_of("rows_as_arrays", None)
        if served is not None:
            group_size = self.tiers[0].packing.group_size
            found: tuple[mx.array, mx.array] = served(
                self._tier_rows(), self.keys, self.values, group_size
            )
            return found
        parts = [tier.dense() for tier in self.tiers if tier.length]
        keys = [*(part[0] for part in parts), self.keys]
        values = [*(part[1] for part in parts), self.values]
        return mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)

    def segments(self) -> list[Segment]:
        found = [
            Segment(tier.keys, tier.values, tier.packing._asdict())
            for tier in self.tiers
            if tier.length
        ]
        keys: Stored = self.keys
        if not self.tied:
            # What evaluates the output evaluates these too, or the graph of every step would grow.
            keys = tied(keys, [self.positions, self.importance])
        return [*found, Segment(keys, self.values, {})]

    def append(
        self,
        keys: mx.array,
        values: mx.array,
        offset: int,
        limit: int,
        ranks: Ranks | None = None,
    ) -> None:
        if keys.shape[2] == 1:
            self.rest(ranks)
        self.keys = mx.concatenate([self.keys, keys], axis=2)
        self.values = mx.concatenate([self.values, values], axis=2)
        self._remember_unscored(keys.shape[2], offset)

    def rest(self, ranks: Ranks | None = None) -> mx.array | None:
        if self.keys.shape[2] < 2 * self.dense_size:
            return None
        return self._arrange(self._all_slots(), self.dense_size, self._ranks(ranks))

    def keep(self, slots: mx.array, *, ranks: mx.array | None = None, added: int = 0) -> mx.array:
        newest = min(self.keys.shape[2], max(0, self.dense_size - added))
        return self._arrange(slots, newest, self.importance if ranks is None else ranks)

    def first(self, length: int) -> MixedRowStore:
        """The rows of the first slots, at least those that are packed."""
        end = length - self.packed_length
        if end < 0:
            raise ValueError(f"[MixedRowStore.first] found {length}, expected the packed rows too.")
        remembered = self.importance[:, :, :length], self.positions[:, :, :length]
        rows = self.keys[:, :, :end], self.values[:, :, :end]
        return MixedRowStore(self.tiers, *rows, *remembered, self.dense_size)

    def truncate(self, length: int) -> None:
        """Forget the newest rows: ``length`` of each head remain."""
        end = max(0, length - self.packed_length)
        self.keys, self.values = self.keys[:, :, :end], self.values[:, :, :end]
        super().truncate(self.packed_length + end)
        if length < self.length:
            slots = mx.argsort(self.positions, axis=2)[:, :, :length]
            self._arrange(mx.sort(slots, axis=2).astype(mx.uint32), 0, self.importance)

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
        if self.keys.shape[2] > self.dense_size:
            ranked = self.ranked(ranks, position)
            order = self._arrange(self._all_slots(), self.dense_size, ranked)
            ranks = mx.take_along_axis(ranked, order, axis=2)
            self.key_statistics = None  # of rows that were elsewhere, and not as packed
        by_importance = isinstance(ranks, str) and ranks == "importance"
        heavy = self.tiers[0].packing
        request = TierRequest(
            self._tier_rows(),
            self.keys,
            self.values,
            self.importance,
            self.positions,
            keys,
            values,
            position,
            sink_size,
            recent_start,
            heavy.group_size,
            None if by_importance else self.ranked(ranks, position),
            self.key_statistics,
        )
        found = serve_tier_replacement(request)
        self.tiers = [
            tier._replace(keys=rows.keys, values=rows.values)
            for tier, rows in zip(self.tiers, found.tiers, strict=True)
        ]
        self.keys, self.values = found.keys, found.values
        self.importance, self.positions = found.importance, found.positions
        self.key_statistics = found.statistics
        self.tied = True

    def replace_keys(self, keys: Any) -> None:
        self._replace_rows("keys", keys, 0)

    def replace_values(self, values: Any) -> None:
        self._replace_rows("values", values, 1)

    def _replace_rows(self, name: str, found: Sequence[mx.array], side: int) -> None:
        stored = self.fetch()
        expected = [(part.shape, part.dtype) for part in stored[side]]
        shapes = [(part.shape, part.dtype) for part in found]
        if shapes != expected:
            raise ValueError(f"[H2OKVCache.{name}] found {shapes}, expected {expected} as stored.")
        keys, values = (found, stored[1]) if side == 0 else (stored[0], found)
        packings = [tier.packing for tier in self.tiers]
        remembered = self.importance, self.positions
        other = MixedRowStore.restored(keys, values, *remembered, packings, self.dense_size)
        self.tiers, self.keys, self.values = other.tiers, other.keys, other.values

    def _tier_rows(self) -> tuple[TierRows, ...]:
        return tuple(TierRows(*tier[:2], *tier.packing[:2]) for tier in self.tiers)

    def _all_slots(self) -> mx.array:
        slots = mx.arange(self.length, dtype=mx.uint32)
        return mx.broadcast_to(slots, self.positions.shape)

    def _ranks(self, ranks: Ranks | None) -> mx.array:
        return self.importance if ranks is None else ranks()

    def _arrange(self, slots: mx.array, newest: int, ranks: mx.array) -> mx.array:
        """Keep the rows at ``slots`` [B, H, n], ascending, the last ``newest`` of them dense.

        O(rows stored). Returns where each row was.
        """
        count = slots.shape[2] - newest
        chosen = self._split(slots[:, :, :count], ranks) if count else self._nothing()
        dense = self.keys.shape[2] - newest
        leaving = self.keys[:, :, :dense], self.values[:, :, :dense]
        before = self.tiers
        self.tiers = []
        for tier, kept in zip(before, chosen, strict=True):
            sources = [other.as_packed(tier.packing) for other in before if other.length]
            if dense:
                sources.append(PackedRows.of(*leaving, tier.packing))
            self.tiers.append(gathered_from(sources, kept) if kept.shape[2] else tier.none())
        self.keys = self.keys[:, :, dense:]
        self.values = self.values[:, :, dense:]
        order = mx.concatenate([*chosen, slots[:, :, count:]], axis=2)
        self._keep_remembered(order)
        return order

    def _nothing(self) -> list[mx.array]:
        return [mx.zeros((*self.positions.shape[:2], 0), mx.uint32) for _ in self.tiers]

    def _split(self, slots: mx.array, ranks: mx.array) -> list[mx.array]:
        """Which of the rows to be packed go to each tier."""
        if len(self.tiers) == 1:
            return [slots]
        light = slice(self.tiers[0].length, self.packed_length)
        return [*halves(slots, ordered(ranks), light)]
