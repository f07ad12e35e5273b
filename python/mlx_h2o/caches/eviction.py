"""Which rows go, by a policy and the windows it must respect, and their removal from the store."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from .. import fast
from ..operations.cache_requests import RankName
from ..policies import Policy, Rows
from ..stores.storage import Storage

__all__ = ["Eviction"]


class Eviction(NamedTuple):
    """One eviction from ``store``, before ``added`` tokens are appended at ``offset``.

    Positions below ``sink_size`` and from ``offset + added - recent_size`` on are protected.
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
        slots = fast.keep_indices(
            ranks,
            self.store.positions,
            keep=keep,
            sink_size=self.sink_size,
            recent_start=self.recent_start,
        )
        self.store.keep(slots, ranks=ranks, added=self.added)

    def split(self, keep: int) -> tuple[mx.array, mx.array]:
        """Slots of the rows that ``compact`` would keep, and of the others: uint32 [B, H, n]."""
        batch, heads, length = self.store.positions.shape
        if keep == 0:
            slots = mx.broadcast_to(mx.arange(length, dtype=mx.uint32), (batch, heads, length))
            return slots[:, :, :0], slots
        ranks, positions = self.ranks(), self.store.positions
        zones: Any = {"sink_size": self.sink_size, "recent_start": self.recent_start}
        kept = fast.keep_indices(ranks, positions, keep=keep, **zones)
        return kept, fast.evict_indices(ranks, positions, count=length - keep, **zones)

    @property
    def recent_start(self) -> int:
        """The first position of the recent window."""
        return self.offset + self.added - self.recent_size

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
