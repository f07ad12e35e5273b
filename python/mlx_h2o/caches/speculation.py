"""Rows of which the newest are provisional, so that drafted tokens can be taken back.

Evictions and scores of a rejected draft must leave no trace. So the last ``speculative + 1`` tokens
seen before an update stay beyond the budget, are never evicted, and what their queries say of other
rows is kept aside. Older ones are *committed* when an update begins, which does not depend on what
it brings: the oldest provisional tokens join the rows under the budget, as one step of a cache
without speculation. What an update commits is remembered until its tokens can no longer be trimmed.
"""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from mlx.utils import tree_map

from ..config import H2OConfig
from ..operations import prefill
from ..stores.choice import empty_store, restored_store
from ..stores.storage import Storage, Stored, tied
from . import handed_out, scoring, stored_attention
from .asides import Aside, Before, arrays_of, bytes_of, taken
from .batch_rows import mapped, sliced
from .bounded import BoundedRows
from .checks import check_attended, check_rows, check_scores

__all__ = ["SpeculativeRows"]


class SpeculativeRows(BoundedRows):
    """At most ``max_kv_size`` rows per head and the provisional ones; ``trim`` restores.

    Slots: the committed rows in any order, then the provisional ones in order.
    """

    def _configure(self, config: H2OConfig, name: str) -> None:
        super()._configure(config, name)
        self._reach = config.speculative + 1
        self._frontier = 0  # tokens that are committed
        self._asides: tuple[Aside, ...] = ()
        self._log: tuple[Before, ...] = ()
        self._gone: list[Storage] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """As ``H2OKVCache.update_and_fetch``, the newest tokens being provisional.

        Commits all but the last ``speculative + 1`` of the tokens seen before, and gathers the rows
        of the layer where that evicts. Of a longer chunk, only the last ``speculative + 1`` tokens
        become provisional.
        """
        check_rows(keys, values, self._store)
        self._check_scored()
        self._settle()
        if self._store is None:
            self._store = empty_store(self.config, keys, values, self._described())
        store = self._store
        arrays = store.positions, store.importance
        before = Before(self.offset, self._frontier, self.evicted, *arrays, self._asides)
        self._gone = []
        self._commit(store, max(self._frontier, self.offset - self._reach))
        added = keys.shape[2]
        store.append(keys, values, self.offset, self.config.max_kv_size + 2 * self._reach)
        self._length = added
        self.offset += added
        self._log = (*self._log, before._replace(gone=tuple(self._gone)))
        self._log = tuple(e for e in self._log if e.offset >= self.offset - self._reach)
        if added > self._reach:
            self._frontier = self.offset - self._reach
            self._surplus = self._committed(store) > self.config.max_kv_size
        self._unscored = self.policy.needs_scores
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Stored, Stored]:
        """The rows as the last update returned them, provisional ones included."""
        keys, values = super().keys_and_values()
        loose = [aside.seen for aside in self._asides]
        if self._log:
            loose += [array for gone in self._log[-1].gone for array in arrays_of(gone)]
        if loose:
            # Untied, they would hold the rows of every step until somebody asks for them.
            keys = tied(keys, loose)
            handed_out.register(keys, self)
        return keys, values

    def ranks_keys(self, queries: mx.array, keys: Stored) -> bool:
        """Never: the rows that attention reads are not those that the next eviction ranks."""
        return False

    def update_scores(
        self, scores: mx.array, *, lse: mx.array | None = None, masked: bool = True
    ) -> None:
        """As ``H2OKVCache.update_scores``; what provisional queries say is kept aside."""
        check_scores(scores, self._store)
        store = cast(Storage, self._store)
        seen = scoring.seen(self.policy, scores, lse)
        head = max(0, seen.shape[2] - self._reach)
        if head > 0:  # of a long update, what is committed at once
            self._fold_waiting(store)
            self._fold(store, Aside(0, seen[:, :, :head], self._unseen))
        self._keep_aside(mx.contiguous(seen[:, :, head:]) if head else seen)

    def attend(
        self,
        queries: mx.array,
        keys: Stored,
        values: Stored,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As ``H2OKVCache.attend``; what provisional queries say is kept aside."""
        check_attended(keys, self._store)
        store = cast(Storage, self._store)
        out, scores, lse = stored_attention.attention_with_scores(
            store, queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
        self.update_scores(scores, lse=lse, masked=True)
        result: mx.array = mx.depends(out, [store.importance, *(a.seen for a in self._asides)])
        return result

    def score_chunk(
        self,
        queries: mx.array,
        keys: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> None:
        """As ``H2OKVCache.score_chunk``; what provisional queries say is kept aside."""
        check_attended(keys, self._store)
        store = cast(Storage, self._store)
        last = min(self._reach, queries.shape[2])
        head, committed = queries.shape[2] - last, self._committed(store)
        if head > 0:
            self._fold_waiting(store)
            taken_in = scoring.after_chunk(
                self.policy,
                self._under(store),
                queries[:, :, :head],
                keys[:, :, :committed],
                scale=scale,
                mask=mask[..., :head, :committed] if isinstance(mask, mx.array) else mask,
                sinks=sinks,
            )
            self._rescore(store, taken_in)
        scores = prefill.last_scores(queries, keys, scale=scale, mask=mask, queries=last)
        self._keep_aside(scoring.seen(self.policy, scores, None, sinks))

    def reset_scores(self) -> None:
        """As ``H2OKVCache.reset_scores``; nothing of before can be restored then."""
        super().reset_scores()
        self._asides = self._log = ()

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens, or all where there are fewer; returns how many.

        Up to ``speculative + 1`` tokens leave no trace: rows, scores and positions are those of a
        cache that was given only what stays, in the same updates of up to ``speculative + 1``
        tokens. More can be taken back until the first eviction, and then their queries' scores
        remain, as in a cache without speculation; so it is of a longer update, of which most is
        committed at once.

        Raises:
            ValueError: rows that were evicted would have to come back.
        """
        n = max(0, min(self.offset, n))
        target = self.offset - n
        exact = target >= min([self._frontier, *(entry.offset for entry in self._log)])
        if not exact and (self.evicted > 0 or self._surplus):
            raise ValueError(
                f"[H2OKVCache.trim] {self._described()} has evicted rows and was asked to take "
                f"back {n} tokens, expected at most {self.offset - self._frontier}."
            )
        if n == 0:
            return 0
        while self._log and self._log[-1].offset >= target:
            self._restore(self._log[-1])
            self._log = self._log[:-1]
        store = cast(Storage, self._store)
        store.truncate(store.length - (self.offset - target))
        self.offset = target
        parts = [aside.part(0, target) for aside in self._asides]
        self._asides = tuple(part for part in parts if part is not None)
        self._frontier = min(self._frontier, target)
        self._unscored = False
        return n

    def is_trimmable(self) -> bool:
        """True: the last ``speculative + 1`` tokens can be taken back, also after evictions."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes stored: as of H2OKVCache, and what is kept to take tokens back."""
        waiting = {id(aside.seen): aside.seen for aside in self._asides}
        for entry in self._log:
            waiting |= {id(aside.seen): aside.seen for aside in entry.asides}
        kept = bytes_of(list(waiting.values())) + sum(entry.nbytes for entry in self._log)
        return super().nbytes + kept

    # Committing

    def _committed(self, store: Storage) -> int:
        return store.length - (self.offset - self._frontier)

    def _commit(self, store: Storage, frontier: int) -> None:
        """Let the tokens up to ``frontier`` join the rows under the budget, as one update.

        One token: evict, append, take in its scores. Several: append, take in the scores, evict.
        """
        count = frontier - self._frontier
        if count == 0:
            return
        budget = self.config.max_kv_size
        if count == 1:
            self._evict(store, budget - 1, self._frontier, 1)
        parts = [aside.part(0, frontier) for aside in self._asides]
        left = [aside.part(frontier, self.offset) for aside in self._asides]
        self._asides = tuple(part for part in left if part is not None)
        self._frontier = frontier
        for part in parts:
            if part is not None:
                self._fold(store, part)
        self._evict(store, budget, frontier, 0)

    def _evict(self, store: Storage, keep: int, offset: int, added: int) -> None:
        """Cut the committed rows down to ``keep``; those that go are held for a while."""
        committed = self._committed(store)
        excess = committed - keep
        if excess <= 0:
            return
        eviction = self._eviction(self._under(store), added)._replace(offset=offset)
        kept, gone = eviction.split(keep)
        self._gone.append(mapped(store, self.config, lambda array: taken(array, gone)))
        rest = mx.arange(committed, store.length, dtype=kept.dtype)
        rest = mx.broadcast_to(rest, (*kept.shape[:2], rest.shape[0]))
        slots = mx.concatenate([kept, rest], axis=2)
        length = store.length
        store.keep(slots)
        self._asides = tuple(aside.moved(slots, length) for aside in self._asides)
        self.evicted += excess

    def _settle(self) -> None:
        """Let the surplus of a long chunk go."""
        if self._surplus and self._store is not None:
            self._check_scored()
            self._surplus = False
            self._evict(self._store, self.config.max_kv_size, self._frontier, 0)
            self._gone = []

    @property
    def _unseen(self) -> float:
        return 0.0 if self.policy.needs_weights else -float("inf")

    def _under(self, store: Storage) -> Storage:
        """The committed rows."""
        sequences = range(store.positions.shape[0])
        return sliced(store, self.config, sequences, 0, self._committed(store))

    def _keep_aside(self, seen: mx.array) -> None:
        aside = Aside(self.offset - seen.shape[2], seen, self._unseen)
        self._asides = (*self._asides, aside)
        self._unscored = False

    def _fold_waiting(self, store: Storage) -> None:
        """Take in what earlier queries say, which a long update commits."""
        waiting, self._asides = self._asides, ()
        for aside in waiting:
            part = aside.part(0, self._frontier)
            if part is None:  # of this update, whose keys several layers share
                self._asides = (*self._asides, aside)
            else:
                self._fold(store, part)

    def _fold(self, store: Storage, aside: Aside) -> None:
        """Let the policy take in what some queries say of the committed rows."""
        seen = aside.wide(self._committed(store))
        self._rescore(store, scoring.after_seen(self.policy, self._under(store), seen))

    def _rescore(self, store: Storage, importance: mx.array) -> None:
        """Give the committed rows their new scores."""
        rest = store.importance[:, :, self._committed(store) :]
        store.importance = mx.concatenate([importance, rest], axis=2)
        store.tied = False

    def _restore(self, before: Before) -> None:
        """The rows and scores as they stood; slots in the order of positions."""
        store = cast(Storage, self._store)
        store.truncate(store.length - (self.offset - before.offset))
        keys, values = store.fetch()
        positions = store.positions
        for gone in before.gone:
            keys, values = tree_map(_behind, (keys, values), gone.fetch())
            positions = _behind(positions, gone.positions)
        order = mx.argsort(positions, axis=2)
        keys, values = tree_map(lambda array: taken(array, order), (keys, values))
        then = mx.argsort(before.positions, axis=2)
        importance = taken(before.importance, then)
        positions = taken(before.positions, then)
        self._store = restored_store(self.config, keys, values, importance, positions)
        self._asides = tuple(aside.moved(then, then.shape[2]) for aside in before.asides)
        self.offset, self._frontier = before.offset, before.frontier
        self.evicted = before.evicted


def _behind(rows: mx.array, more: mx.array) -> mx.array:
    return mx.concatenate([rows, more], axis=2)
