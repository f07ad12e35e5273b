"""What it takes to undo an update: how things stood before it, and the rows that it let go."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..config import H2OConfig
from ..operations.buffers import exchanged
from ..stores.choice import restored_store
from ..stores.storage import Storage, Stored
from .asides import Aside, taken
from .provisional_ranks import ProvisionalRanks

__all__ = ["Before", "Overwritten", "overwrite", "overwrite_one"]


class Overwritten(NamedTuple):
    """What an update in place wrote over: the rows that went, and where others were moved.

    length: rows per head before.
    slots: uint32 [B, H, n], where the rows that went were.
    rows: those, as they were stored.
    start: None, or the first of the slots that other rows were moved from, to ``slots``.
    """

    length: int
    slots: mx.array
    rows: list[mx.array]
    start: int | None = None

    @property
    def source(self) -> mx.array | None:
        """None, or the slots that other rows were moved from, as ``slots``."""
        if self.start is None:
            return None
        return mx.broadcast_to(
            mx.arange(self.start, self.length, dtype=mx.uint32), self.slots.shape
        )

    def keys(self, store: Storage) -> Stored:
        """The keys of the rows that went."""
        if not isinstance(store.fetch()[0], tuple):
            return self.rows[0]
        return self.rows[0], self.rows[1], self.rows[2]

    def undo(self, store: Storage) -> None:
        """Put every row where it was; importance and positions are not touched."""
        store.reserve(self.length)
        moved = store.exchange(self.slots, self.rows)
        if self.start is not None:
            store.assign(self.start, moved)
            store.exchange(self.slots, self.rows)  # one may have been among the last


def overwrite_one(
    store: Storage, slots: mx.array, keys: mx.array, values: mx.array, position: int
) -> Overwritten:
    """Write one new row over the row at ``slots`` [B, H, 1] of each head."""
    rows = store.exchange(slots, store.as_stored(keys, values))
    place = mx.array(position, mx.int32)
    store.importance = mx.put_along_axis(store.importance, slots, mx.array(mx.nan), axis=2)
    store.positions = mx.put_along_axis(store.positions, slots, place, axis=2)
    return Overwritten(store.length, slots, rows)


def overwrite(store: Storage, slots: mx.array) -> Overwritten:
    """Let the rows at ``slots`` [B, H, n] go: those of the last n slots, which stay, take their
    places. Where n is 1, the last may be the one that goes."""
    length, count = store.length, slots.shape[2]
    start = length - count
    rows = store.exchange(slots, None, start)
    done = Overwritten(length, slots, rows, start)
    last = cast(mx.array, done.source)
    store.importance = exchanged(store.importance, last, slots, axis=2)
    store.positions = exchanged(store.positions, last, slots, axis=2)
    store.truncate(start)
    return done


class Before(NamedTuple):
    """How things stood before an update, less the keys and values that are still stored.

    gone: the rows that the update evicted where it gathered the others.
    overwritten: the same where it wrote in place.
    whole: all rows, where it may have packed some.
    ranks: what was known of the keys.
    """

    offset: int
    frontier: int
    evicted: int
    positions: mx.array
    importance: mx.array
    asides: tuple[Aside, ...]
    ordered: bool
    tail: int
    gone: Storage | None = None
    overwritten: Overwritten | None = None
    whole: Storage | None = None
    ranks: ProvisionalRanks | None = None

    @property
    def held(self) -> list[mx.array]:
        """The rows that are kept for this."""
        if self.overwritten is not None:
            return self.overwritten.rows
        if self.gone is None:
            return []
        leaves: Any = tree_flatten([*self.gone.fetch(), self.gone.positions, self.gone.companions])
        return [array for _, array in leaves]

    @property
    def nbytes(self) -> int:
        """Bytes kept, those of asides excepted."""
        held: Sequence[mx.array] = self.held
        ranks = 0 if self.ranks is None else self.ranks.nbytes
        return self.positions.nbytes + self.importance.nbytes + ranks + sum(a.nbytes for a in held)

    def held_beside(self, store: Storage | None) -> dict[int, mx.array]:
        """The arrays of ``whole`` that the store no longer has, by their identity."""
        if self.whole is None:
            return {}
        own = set() if store is None else {id(array) for array in store.arrays()}
        return {id(array): array for array in self.whole.arrays() if id(array) not in own}

    def restored(self, store: Storage, config: H2OConfig) -> Storage:
        """The rows as they were, each in its slot; ``store`` has those of the update, or what is
        left of it."""
        if self.whole is not None:
            # Copies may share this log: what is restored is not the one that it holds.
            return copy.copy(self.whole)
        if self.gone is not None:
            return self._merged(store, self.gone, config)
        if self.overwritten is not None:
            self.overwritten.undo(store)
        store.remember(self.importance, self.positions)
        return store

    def _merged(self, store: Storage, gone: Storage, config: H2OConfig) -> Storage:
        """Of an update that gathered: its rows are the last, and those that went are apart."""
        left = self.positions.shape[2] - gone.length
        store.truncate(left)
        keys, values = tree_map(_behind, store.fetch(), gone.fetch())
        order = mx.argsort(_behind(store.positions, gone.positions), axis=2)
        place = mx.argsort(mx.argsort(self.positions, axis=2), axis=2)
        slots = mx.take_along_axis(order, place, axis=2)
        keys, values = tree_map(lambda array: taken(array, slots), (keys, values))
        found = restored_store(config, keys, values, self.importance, self.positions)
        beside = zip(store.companions, gone.companions, strict=True)
        found.companions = tuple(taken(_behind(*arrays), slots) for arrays in beside)
        return found


def _behind(rows: mx.array, more: mx.array) -> mx.array:
    return mx.concatenate([rows, more], axis=2)
