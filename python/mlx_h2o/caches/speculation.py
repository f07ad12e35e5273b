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

from ..config import H2OConfig
from ..operations import prefill
from ..stores.choice import empty_store
from ..stores.storage import Storage, Stored, tied
from . import handed_out, key_ranks, scoring, stored_attention
from .asides import Aside
from .batch_rows import sliced
from .checks import check_attended, check_rows, check_scores
from .provisional import ProvisionalRows
from .provisional_ranks import ProvisionalRanks
from .rewinding import Before

__all__ = ["SpeculativeRows"]


class SpeculativeRows(ProvisionalRows):
    """At most ``max_kv_size`` rows per head and the provisional ones; ``trim`` restores."""

    def _configure(self, config: H2OConfig, name: str) -> None:
        super()._configure(config, name)
        self._log: tuple[Before, ...] = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """As ``H2OKVCache.update_and_fetch``, the newest tokens being provisional.

        Commits all but the last ``speculative + 1`` of the tokens seen before. Where that evicts,
        new rows are written over those that go. Of a longer chunk, which gathers, only the last
        ``speculative + 1`` tokens become provisional.
        """
        check_rows(keys, values, self._store)
        self._check_scored()
        self._settle()
        self._begin()
        if self._store is None:
            self._store = empty_store(self.config, keys, values, self._described())
        store, added = self._store, keys.shape[2]
        before = self._advance(store, keys, values)
        self._length = added
        self.offset += added
        oldest = self.offset - self._reach
        self._log = tuple(entry for entry in (*self._log, before) if entry.offset >= oldest)
        if added > self._reach:
            self._frontier = oldest
            self._surplus = self._committed(store) > self.config.max_kv_size
        self._unscored = self.policy.needs_scores
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Stored, Stored]:
        """The rows as the last update returned them, provisional ones included."""
        store = self._store
        if store is None:
            return super().keys_and_values()
        keys, values = store.handed(self._length)
        # Untied, they would hold the rows of every step until somebody asks for them.
        loose = [aside.seen for aside in self._asides] + (self._log[-1].held if self._log else [])
        known = self._known_ranks(store)
        loose += [] if known is None else known.arrays
        keys = tied(keys, [store.positions, store.importance, *loose])
        handed_out.register(keys, self)
        return keys, values

    def ranks_keys(self, queries: mx.array, keys: Stored) -> bool:
        """Whether ``attend`` ranks the rows by their keys, for each number of tokens that the next
        update may commit, in its one read of them."""
        store = self._store
        return (
            self.policy.ranked_by == "key_diversity"
            and store is not None
            and store.by_slot
            and not self._surplus
            and self._committable > 0
            and self._committed(store) + self._committable > self.config.max_kv_size
            and key_ranks.pays(queries, keys, store, key_ranks.DRAFT_READ_BYTES)
        )

    @property
    def _committable(self) -> int:
        """Tokens that the next update commits where none is taken back."""
        return self.offset - self._reach - self._frontier

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
            start = self.offset - seen.shape[2]
            self._fold(store, Aside(start, seen[:, :, :head], self._unseen))
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
        if self.ranks_keys(queries, keys):
            out, self._next_ranks = ProvisionalRanks.attend(
                self._known_ranks(store), store, queries, keys, values,
                counts=self._committable, provisional=self.offset - self._frontier,
                shared_heads=self.config.shared_heads, scale=scale, mask=mask, sinks=sinks,
            )  # fmt: skip
            return out
        out, scores, lse = stored_attention.attention_with_scores(
            store, queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
        self.update_scores(scores, lse=lse, masked=True)
        # Where rows move in every step, what is kept aside moves with them.
        asides = self._asides if store.in_segments else self._asides[-1:]
        result: mx.array = mx.depends(out, [store.importance, *(one.seen for one in asides)])
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
        if head > 0:  # then the committed rows are the first
            self._fold_waiting(store)
            sequences = range(store.positions.shape[0])
            taken_in = scoring.after_chunk(
                self.policy,
                sliced(store, self.config, sequences, 0, committed),
                queries[:, :, :head],
                keys[:, :, :committed],
                scale=scale,
                mask=mask[..., :head, :committed] if isinstance(mask, mx.array) else mask,
                sinks=sinks,
            )
            rest = store.importance[:, :, committed:]
            store.importance = mx.concatenate([taken_in, rest], axis=2)
            store.tied = False
        scores = prefill.last_scores(queries, keys, scale=scale, mask=mask, queries=last)
        self._keep_aside(scoring.seen(self.policy, scores, None, sinks))

    def reset_scores(self) -> None:
        """As ``H2OKVCache.reset_scores``; nothing of before can be restored then."""
        super().reset_scores()
        self._asides = self._log = ()
        if self._store is not None:
            self._straighten(self._store)

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
        self._forget_newest(cast(Storage, self._store), self.offset - target)
        self.offset = target
        parts = [aside.part(0, target) for aside in self._asides]
        self._asides = tuple(part for part in parts if part is not None)
        if target < self._frontier:
            self._frontier = target
            self._forget_ranks()
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
        for entry in self._log:
            waiting |= entry.held_beside(self._store)
        kept = sum(array.nbytes for array in waiting.values())
        return super().nbytes + kept + sum(entry.nbytes for entry in self._log)

    def _settle(self) -> None:
        """Let the surplus of a long chunk go."""
        store = self._store
        if self._surplus and store is not None:
            self._check_scored()
            self._surplus = False
            excess = self._committed(store) - self.config.max_kv_size
            self._gather_others(store, self._worst(store, excess, self._frontier, 0))
            self.evicted += excess

    def _fold_waiting(self, store: Storage) -> None:
        """Take in what earlier queries say, which a long update commits."""
        waiting, self._asides = self._asides, ()
        for aside in waiting:
            part = aside.part(0, self._frontier)
            if part is None:  # of this update, whose keys several layers share
                self._asides = (*self._asides, aside)
            else:
                self._fold(store, part)
