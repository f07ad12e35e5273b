"""Which rows go, by a policy and the windows it must respect, and their removal from the store."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .. import fast
from ..operations.cache_requests import RankName
from ..policies import Policy, Rows
from ..stores.storage import Storage

__all__ = ["Eviction"]


class Eviction(NamedTuple):
    """One eviction from ``store``, before ``added`` tokens are appended at ``offset``.

    Positions below ``sink_size`` and from ``offset + added - recent_size`` on are protected; so are
    those from ``before`` on, where that is given.
    Replacement and compaction drop the same rows: both rank by ``fast``'s one order.
    """

    store: Storage
    policy: Policy
    offset: int
    added: int
    sink_size: int
    recent_size: int
    shared_heads: bool = False
    ranked: bool = False  # the importance of the rows is their rank
    before: int | None = None

    def replace_worst(self, keys: mx.array, values: mx.array) -> None:
        """Overwrite the worst row of each head by the new row; the others stay where they are."""
        self.store.replace_worst(
            keys,
            values,
            self.offset,
            sink_size=self.sink_size,
            recent_start=self.recent_start,
            ranks=self.ranking(),
        )

    def ranking(self) -> mx.array | RankName:
        """What the rows are ranked by: a name that ``fast.replace_worst`` knows, or the ranks."""
        if self.ranked:
            return "importance"
        return (None if self.shared_heads else self.policy.ranked_by) or self.ranks()

    def compact(self, keep: int) -> None:
        """Keep the best ``keep`` rows of each head, in the order of their slots."""
        if keep == 0:
            self.store.truncate(0)
            return
        ranks = self.ranks()
        self.store.keep(self.best(keep, ranks), ranks=ranks, added=self.added)

    def best(self, keep: int, ranks: mx.array) -> mx.array:
        """Slots uint32 [B, H, keep], ascending, of the rows that stay by these ranks."""
        return fast.keep_indices(
            ranks,
            self.store.positions,
            keep=keep,
            sink_size=self.sink_size,
            recent_start=self.recent_start,
        )

    def worst(self, count: int, ranks: mx.array | None = None) -> mx.array:
        """Slots uint32 [B, H, count] of the rows that go, in no particular order.

        By ``ranks`` [B, H, N], where they are known already.
        """
        if ranks is None:
            ranks = self.store.ranked(self.ranking(), self.offset)
        return fast.evict_indices(
            ranks,
            self.store.positions,
            count=count,
            sink_size=self.sink_size,
            recent_start=self.recent_start,
        )

    @property
    def recent_start(self) -> int:
        """The first position of the recent window."""
        start = self.offset + self.added - self.recent_size
        return start if self.before is None else min(start, self.before)

    def ranks(self) -> mx.array:
        """float32 [B, H, N], higher is kept."""
        if self.ranked:
            return self.store.importance
        keys, values = self.store.dense()
        rows = Rows(keys, values, self.store.importance, self.store.positions, self.offset)
        ranks = self.policy.rank(rows)
        if self.shared_heads:
            # The same rows in the same slots of every head: NaN in one of them is NaN in the mean.
            ranks = mx.broadcast_to(mx.mean(ranks, axis=1, keepdims=True), ranks.shape)
        return ranks
