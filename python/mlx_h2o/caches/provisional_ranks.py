"""keydiff's ranks in the pass of attention, where the newest rows are provisional.

How many tokens the next update commits depends on how many are taken back until then, and with it
which keys the others are compared with. So there is a probe for each number, all in one pass.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from .. import fast
from ..operations.buffers import exchanged, gathered
from ..operations.key_statistics import dense_rows, inverse_norms_of
from ..stores.storage import Storage, Stored
from .key_ranks import AFRESH, each_part, packing_of, ranks_of

__all__ = ["ProvisionalRanks"]


@dataclass(frozen=True, eq=False)
class ProvisionalRanks:
    """What is known of the stored keys of a layer.

    Attributes:
        committed: float32 [B, H, D], the sum of the normalised keys of the committed rows.
        inverse_norms: float32 [B, H, N], of all rows, in the order of slots.
        directions: float32 [B, H, P, D], the normalised keys of the provisional rows, in order.
        positions: of the rows that this is of.
        ranks: None, or float32 [B, H, E, N]: of all rows, where the next update commits 1 to E.
        replaced: rows per head that went since all was made anew.
    """

    committed: mx.array
    inverse_norms: mx.array
    directions: mx.array
    positions: weakref.ref[mx.array]
    ranks: mx.array | None = None
    replaced: int = 0

    @classmethod
    def of(cls, keys: Stored, store: Storage, provisional: int) -> ProvisionalRanks:
        """Of the stored keys, the newest ``provisional`` rows being that: reads them all."""
        key_sum, inverse_norms = fast.key_statistics(keys, **packing_of(store.attention_settings))
        slots = mx.argsort(store.positions, axis=2)[:, :, store.length - provisional :]
        rows = each_part(lambda part: gathered(part, slots), keys)
        directions = _directions(rows, store)[0]
        committed = key_sum - mx.sum(directions, axis=2)
        return cls(committed, inverse_norms, directions, weakref.ref(store.positions))

    def describes(self, store: Storage) -> bool:
        """Whether the store holds the very rows that this is about."""
        return self.positions() is store.positions

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated with the rows."""
        return [self.committed, self.inverse_norms, self.directions]

    @property
    def nbytes(self) -> int:
        """Bytes of the ranks, which a log of updates keeps, and of the arrays beside them."""
        arrays = self.arrays if self.ranks is None else [*self.arrays, self.ranks]
        return sum(array.nbytes for array in arrays)

    @classmethod
    def attend(
        cls,
        known: ProvisionalRanks | None,
        store: Storage,
        queries: mx.array,
        keys: Stored,
        values: Stored,
        *,
        counts: int,
        provisional: int,
        shared_heads: bool,
        scale: float,
        **settings: Any,
    ) -> tuple[mx.array, ProvisionalRanks]:
        """Attention, whose output evaluates the ranks for each number up to ``counts``."""
        if known is None or known.replaced >= AFRESH or not known.describes(store):
            known = cls.of(keys, store, provisional)
        # One token is committed after a row has gone, several before: see ProvisionalRows.
        sums = mx.expand_dims(known.committed, 2)
        if counts > 1:
            more = mx.cumsum(known.directions[:, :, :counts], axis=2)[:, :, 1:]
            sums = mx.concatenate([sums, sums + more], axis=2)
        out, ranks = ranks_of(
            sums, known.inverse_norms, store, queries, keys, values,
            scale=scale, shared_heads=shared_heads, **settings,
        )  # fmt: skip
        return mx.depends(out, [ranks, *known.arrays]), replace(known, ranks=ranks)

    def ranks_for(self, count: int) -> mx.array | None:
        """float32 [B, H, N] where the update commits so many tokens, if attention gave them."""
        if self.ranks is None or count > self.ranks.shape[2]:
            return None
        return self.ranks[:, :, count - 1]

    # What becomes of it as rows come and go

    def committing(self, count: int, gone: Stored | None, store: Storage) -> ProvisionalRanks:
        """The oldest ``count`` provisional rows are committed, ``gone`` are no longer counted."""
        committed = self.committed + mx.sum(self.directions[:, :, :count], axis=2)
        replaced = self.replaced
        if gone is not None:
            committed = (
                committed - fast.key_statistics(gone, **packing_of(store.attention_settings))[0]
            )
            replaced += (gone[0] if isinstance(gone, tuple) else gone).shape[2]
        directions = self.directions[:, :, count:]
        return replace(
            self, committed=committed, directions=directions, ranks=None, replaced=replaced
        )

    def exchanged(self, source: mx.array, target: mx.array) -> ProvisionalRanks:
        """The rows of the last slots ``source`` have moved to ``target``; those slots are gone."""
        norms = exchanged(self.inverse_norms, source, target, axis=2)
        return replace(self, inverse_norms=norms[:, :, : norms.shape[2] - source.shape[2]])

    def moved(self, slots: mx.array, store: Storage) -> ProvisionalRanks:
        """The row in slot ``slots[i]`` is in slot i now; others are gone."""
        ranks = self.ranks
        if ranks is not None:
            index = mx.broadcast_to(mx.expand_dims(slots, 2), (*ranks.shape[:3], slots.shape[2]))
            ranks = mx.take_along_axis(ranks, index, axis=3)
        norms = mx.take_along_axis(self.inverse_norms, slots, axis=2)
        positions = weakref.ref(store.positions)
        return replace(self, inverse_norms=norms, ranks=ranks, positions=positions)

    def with_new(
        self, keys: Stored, store: Storage, slot: mx.array | None = None
    ) -> ProvisionalRanks:
        """New rows behind the others, or one at ``slot`` [B, H, 1]."""
        directions, norms = _directions(keys, store)
        if slot is None:
            norms = mx.concatenate([self.inverse_norms, norms], axis=2)
        else:
            norms = mx.put_along_axis(self.inverse_norms, slot, norms, axis=2)
        return replace(
            self,
            inverse_norms=norms,
            directions=mx.concatenate([self.directions, directions], axis=2),
            positions=weakref.ref(store.positions),
            ranks=None,
        )

    def without_newest(self, count: int, store: Storage) -> ProvisionalRanks:
        """The newest ``count`` rows, which were the last ones, are gone."""
        length = store.length
        return replace(
            self,
            inverse_norms=self.inverse_norms[:, :, :length],
            directions=self.directions[:, :, : self.directions.shape[2] - count],
            ranks=None if self.ranks is None else self.ranks[..., :length],
            positions=weakref.ref(store.positions),
        )


def _directions(keys: Stored, store: Storage) -> tuple[mx.array, mx.array]:
    """Normalised keys and inverse norms, float32."""
    packing = packing_of(store.attention_settings)
    dense = dense_rows(keys, packing.get("bits", 8), packing.get("group_size", 64))
    norms = inverse_norms_of(dense)
    return dense * mx.expand_dims(norms, -1), norms
