"""Rows under a budget, and provisional ones: when a token is committed, and what goes then.

A step in place writes over the rows that go. One new row takes the slot of the one that went; of
several, which must be the last rows in order, rows of the last slots move into the slots that fall
free. So nothing is gathered, and the buffers keep their size.
"""

from __future__ import annotations

import copy

import mlx.core as mx

from .. import fast
from ..config import H2OConfig
from ..operations.buffers import gathered
from ..stores.storage import Storage, Stored
from . import scoring
from .asides import Aside, taken
from .batch_rows import mapped, sliced
from .bounded import BoundedRows
from .key_ranks import each_part
from .provisional_ranks import ProvisionalRanks
from .rewinding import Before, Overwritten, overwrite, overwrite_one

__all__ = ["ProvisionalRows"]


class ProvisionalRows(BoundedRows):
    """At most ``max_kv_size`` committed rows per head, and the provisional ones: the newest.

    A row is provisional if its position is ``_frontier`` or more. Slots have no order but that
    the rows of an update of several tokens are the last, in order.
    """

    def _configure(self, config: H2OConfig, name: str) -> None:
        super()._configure(config, name)
        self._reach = config.speculative + 1
        self._frontier = 0  # tokens that are committed
        self._asides: tuple[Aside, ...] = ()
        self._ordered = True  # slots are in the order of positions
        self._tail = 0  # where they are not: last slots with the newest tokens, in order
        self._next_ranks: ProvisionalRanks | None = None

    def _committed(self, store: Storage) -> int:
        return store.length - (self.offset - self._frontier)

    def _before(self, store: Storage) -> Before:
        remembered = store.positions, store.importance, self._asides
        order = self._ordered, self._tail
        ranks = self._known_ranks(store)
        before = Before(self.offset, self._frontier, self.evicted, *remembered, *order, ranks=ranks)
        if not store.in_segments:
            return before
        # Packing a row cannot be undone. Nothing is copied: the arrays are those of now.
        return before._replace(whole=copy.copy(store))

    def _advance(self, store: Storage, keys: mx.array, values: mx.array) -> Before:
        """Commit what is due, as one update, and store the new rows; what it takes to undo that.

        One token: evict, append, take in its scores. Several: append, take in the scores, evict.
        """
        before, added = self._before(store), keys.shape[2]
        if added > self._reach:
            self._straighten(store)  # nothing of before can be undone
            self._next_ranks = None
        known = self._known_ranks(store)
        frontier = max(self._frontier, self.offset - self._reach)
        count = frontier - self._frontier
        excess = self._committed(store) + count - self.config.max_kv_size if count else 0
        going: mx.array | None = None
        ranks = known.ranks_for(count) if known is not None and count > 0 else None
        if excess > 0 and count == 1:
            going = self._worst(store, excess, self._frontier, 1, ranks)
        self._take_in(store, frontier)
        if excess > 0 and count > 1:
            going = self._worst(store, excess, frontier, 0, ranks)
        self.evicted += max(0, excess)
        if going is None:
            self._append_behind(store, keys, values)
            self._next_ranks = self._known_after(known, store, count, None, keys)
            return before
        if not self._in_place(store, excess, added):
            gone = self._gather_others(store, going)
            known = self._next_ranks
            self._append_behind(store, keys, values)
            lost = None if gone is None else gone.fetch()[0]
            self._next_ranks = self._known_after(known, store, count, lost, keys)
            return before._replace(gone=gone)
        done = self._write_over(store, going, keys, values)
        self._next_ranks = self._known_after(known, store, count, done.keys(store), keys, done)
        return before._replace(overwritten=done)

    def _in_place(self, store: Storage, excess: int, added: int) -> bool:
        """Of a chunk, and where the newest rows are not the last, the others are gathered."""
        newest_last = self._ordered or self._tail >= excess or excess == 1
        return store.by_slot and newest_last and added <= self._reach and excess <= self._reach

    def _write_over(
        self, store: Storage, going: mx.array, keys: mx.array, values: mx.array
    ) -> Overwritten:
        count = going.shape[2]
        store.tied = False
        if count == keys.shape[2] == 1:
            self._ordered, self._tail, self._overwrote = False, 0, True
            return overwrite_one(store, going, keys, values, self.offset)
        done = overwrite(store, going)  # the last rows are provisional: none of those goes
        source = done.source
        if source is not None:
            moved = source, going, done.length
            self._asides = tuple(aside.exchanged(*moved) for aside in self._asides)
        self._ordered, self._tail = False, 0
        self._append_behind(store, keys, values)
        return done

    def _append_behind(self, store: Storage, keys: mx.array, values: mx.array) -> None:
        length, slots = store.length, store.rest(self._eviction(store, 0).ranks)
        if slots is not None:
            self._asides = tuple(aside.moved(slots, length) for aside in self._asides)
        store.append(keys, values, self.offset, self.config.max_kv_size + 2 * self._reach)
        self._tail += keys.shape[2]

    def _gather_others(self, store: Storage, going: mx.array) -> Storage | None:
        """Keep all rows but those at ``going``, in the order of positions; return those.

        None in mixed precision, where what was before is held as a whole.
        """
        gone = None
        if not store.in_segments:
            gone = mapped(store, self.config, lambda array: taken(array, going))
        last = mx.array(mx.iinfo(mx.int32).max)
        order = mx.argsort(mx.put_along_axis(store.positions, going, last, axis=2), axis=2)
        self._rearrange(store, order[:, :, : store.length - going.shape[2]])
        return gone

    def _straighten(self, store: Storage) -> None:
        """Rows in the order of positions; what would undo earlier updates does not know of it."""
        if not self._ordered:
            self._rearrange(store, mx.argsort(store.positions, axis=2))

    def _rearrange(self, store: Storage, slots: mx.array) -> None:
        length, known = store.length, self._known_ranks(store)
        ranks = self._eviction(store, 0).ranks() if store.in_segments else None
        slots = store.keep(slots, ranks=ranks)
        self._next_ranks = known and known.moved(slots, store)
        self._asides = tuple(aside.moved(slots, length) for aside in self._asides)
        self._ordered, self._tail = True, 0

    def _forget_newest(self, store: Storage, count: int) -> None:
        """Let the rows of the newest ``count`` tokens go, for good."""
        if count > self._tail:
            self._straighten(store)  # there is no log then: it reaches as far as what it is of
        known = self._known_ranks(store)
        store.truncate(store.length - count)
        self._next_ranks = known and known.without_newest(count, store)
        self._tail = max(0, self._tail - count)

    def _restore(self, before: Before) -> None:
        """All as it stood before an update."""
        assert self._store is not None
        self._store = before.restored(self._store, self.config)
        self._asides, self._next_ranks = before.asides, before.ranks
        self._ordered, self._tail = before.ordered, before.tail
        self.offset, self._frontier = before.offset, before.frontier
        self.evicted = before.evicted

    def _known_ranks(self, store: Storage) -> ProvisionalRanks | None:
        """What is known of the keys of these rows."""
        known = self._next_ranks
        return known if known is not None and known.describes(store) else None

    @classmethod
    def _known_after(
        cls,
        known: ProvisionalRanks | None,
        store: Storage,
        count: int,
        gone: Stored | None,
        keys: mx.array,
        done: Overwritten | None = None,
    ) -> ProvisionalRanks | None:
        """What is known after an update that committed ``count`` tokens and stored ``keys``."""
        if known is None:
            return None
        known, slot = known.committing(count, gone, store), None
        source = None if done is None else done.source
        if done is not None and source is None:
            slot = done.slots
        elif done is not None and source is not None:
            known = known.exchanged(source, done.slots)
        return known.with_new(cls._newest_keys(store, keys, slot), store, slot)

    def _forget_ranks(self) -> None:
        super()._forget_ranks()
        self._next_ranks = None

    @staticmethod
    def _newest_keys(store: Storage, keys: mx.array, slot: mx.array | None = None) -> Stored:
        """New keys as they are stored: behind the others, or one at ``slot``."""
        stored = store.fetch()[0]
        if not isinstance(stored, tuple):
            return keys
        if slot is not None:
            return each_part(lambda part: gathered(part, slot), stored)
        return each_part(lambda part: part[:, :, store.length - keys.shape[2] :], stored)

    # Which rows go

    def _worst(
        self, store: Storage, count: int, offset: int, added: int, ranks: mx.array | None = None
    ) -> mx.array:
        """Slots uint32 [B, H, count] of those that go of the rows before position ``offset``.

        ``ranks`` [B, H, N], where attention gave them.
        """
        eviction = self._eviction(store, added)._replace(offset=offset, before=offset)
        if ranks is not None:
            return eviction.worst(count, ranks)
        if self.policy.ranked_by in ("importance", "age"):  # each row by itself
            return eviction.worst(count)
        candidates = store.length - (self.offset - offset)
        if self._ordered:
            under = sliced(store, self.config, range(store.positions.shape[0]), 0, candidates)
            return eviction._replace(store=under).worst(count)
        age = (offset - store.positions).astype(mx.float32)
        slots = fast.keep_indices(age, store.positions, keep=candidates)
        under = mapped(store, self.config, lambda array: taken(array, slots))
        worst = eviction._replace(store=under).worst(count)
        return mx.take_along_axis(slots, worst, axis=2)

    # What provisional queries say

    @property
    def _unseen(self) -> float:
        return 0.0 if self.policy.needs_weights else -float("inf")

    def _keep_aside(self, seen: mx.array) -> None:
        aside = Aside(self.offset - seen.shape[2], seen, self._unseen)
        self._asides = (*self._asides, aside)
        self._unscored = False

    def _take_in(self, store: Storage, frontier: int) -> None:
        """Let the tokens up to ``frontier`` be committed, and take in what their queries say."""
        parts = [aside.part(0, frontier) for aside in self._asides]
        left = [aside.part(frontier, self.offset) for aside in self._asides]
        self._asides = tuple(part for part in left if part is not None)
        self._frontier = frontier
        for part in parts:
            if part is not None:
                self._fold(store, part)

    def _fold(self, store: Storage, aside: Aside) -> None:
        """Let the policy take in what some queries say of the rows up to theirs."""
        own = store.positions < aside.stop
        one = aside.stop - aside.start == 1  # then no row looks at another
        seen = aside.wide(store.length) if one else aside.visible(own)
        scored = scoring.after_seen(self.policy, store, seen)
        store.importance = mx.where(own, scored, store.importance)
        store.tied = False
