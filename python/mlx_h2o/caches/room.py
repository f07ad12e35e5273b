"""When rows go, and how many: what the settings of a cache mean for the rows that it holds."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import H2OConfig
from . import tiers
from .eviction import Eviction
from .scores import settle
from .table import Table

_UNBOUNDED = 2**31 - 1


class Room:
    """The limits of a table of which others hold the first ``shared`` rows too.

    Attributes:
        budget: rows of each head that stay, of the table's own.
        tail_limit: dense rows of mixed precision; else the budget.
        reach: the newest tokens, which may be taken back.
        certain: tokens whose rows may have gone, of which none is taken back.
    """

    def __init__(self, config: H2OConfig, shared: int) -> None:
        self._config, self._shared = config, shared
        self._mixed, self._group, self.reach = config.mixed, config.group, config.reach
        self.certain = 0
        self._few = max(1, self.reach)  # tokens of a step at which single rows go
        self._sinks = max(0, config.protected - shared)
        self._plan(0)

    def _plan(self, tokens: int) -> None:
        """Have the budget of so many tokens."""
        config = self._config
        most = config.max_kv_size or _UNBOUNDED
        later = ((end, rows) for end, rows in config.rows_at if end >= tokens)
        self._planned, rows = next(later, (_UNBOUNDED, most))
        self.budget = rows - self._shared
        self.tail_limit = tiers.tail_limit(config) if self._mixed else self.budget
        self._recent_size = max((config.recent_size or 0) * rows // most, self.reach)

    def free(self, table: Table, length: int) -> int:
        """How many tokens, none of them padding, may come before anything else happens than an
        append, in steps of ``length``."""
        lengths, rows = table.lengths, table.tail.rows
        if length > self._few or not min(lengths) or (self._mixed and table.ragged):
            return 0
        left = min(self.budget - max(lengths), self._planned - max(table.tokens))
        return min(left, min(self.tail_limit, table.tail.capacity) - max(rows))

    def surplus(self, table: Table) -> bool:
        """Whether rows of a chunk are there beyond the budget."""
        return max(table.lengths, default=0) > self.budget

    def rests(self, table: Table) -> bool:
        """Whether the table has no more rows than it may, nor room for more."""
        return not self.surplus(table) and table.tail.capacity <= self.tail_limit

    def make(self, table: Table, counts: Sequence[int]) -> Table:
        """Let go what is due before so many rows of each sequence come; at once again, nothing."""
        if not table.segments:
            return table
        added, seen, policy = max(counts), table.tokens[0], self._config.policy
        if self._config.rows_at:
            self._plan(max(table.tokens) + added)
        if self._config.preallocate:
            table.give_back()
        lengths = table.lengths
        both = enumerate(zip(lengths, table.tail.rows, strict=True))
        due = [n for n, (rows, new) in both if rows > self.budget or new > self.tail_limit]
        if due:
            settle(policy, table, seen - self.reach)
            table = self._evict(table, due, self.budget, [0] * len(counts))
            lengths = table.lengths
        if self.reach:
            settle(policy, table, seen + added - self.reach)
        keeps = [self._kept(rows, count) for rows, count in zip(lengths, counts, strict=True)]
        due = [n for n, keep in enumerate(keeps) if keep < lengths[n]]
        table = self._evict(table, due, keeps[due[0]] if due else 0, counts)
        if self._mixed:
            full = [n for n, rows in enumerate(table.tail.rows) if rows >= self.tail_limit]
            table = self._evict(table, full if added else [], _UNBOUNDED, counts)
        if added <= self._few:
            table.fit(self.tail_limit)
        return table

    def _kept(self, rows: int, added: int) -> int:
        """Of a sequence's rows, how many stay when so many come."""
        need = rows + added - self.budget
        if need <= 0 or not 0 < added <= self._few:
            return rows
        # Of those that no range protects, a whole group.
        evictable = rows - self._sinks - max(0, self._recent_size - added)
        return rows - max(need, min(self._group, evictable))

    def _evict(self, table: Table, due: Sequence[int], keep: int, counts: Sequence[int]) -> Table:
        """Let all but the best ``keep`` rows of the sequences in ``due`` go, before rows come."""
        if not due:
            return table
        ends = [seen + new for seen, new in zip(table.tokens, counts, strict=True)]
        self.certain = max(self.certain, ends[0] - self.reach)
        eviction = Eviction(
            table=table,
            config=self._config,
            due=due,
            keep=min(keep, table.width),
            ends=ends,
            sinks=self._sinks,
            recent_size=self._recent_size,
            tail=min(table.tail.rows[0], max(0, self.reach - max(counts))),
        )
        if self._mixed:
            return tiers.pack_older(eviction)
        eviction.run()
        return table
