"""When a cache evicts rows, and how many, according to its settings."""

from collections.abc import Sequence
from functools import partial
from operator import add, gt, sub

from ..config import H2OConfig
from . import tiers
from .eviction import Eviction
from .scores import settle
from .table import Table

_UNBOUNDED = 2**31 - 1


class Room:
    """The limits of a table, and of what it becomes.

    Attributes:
        budgets: how many of each sequence's own rows stay, per head.
        tail_limit: most dense rows in mixed precision; else the largest budget.
        reach: how many of the newest tokens can be taken back.
    """

    def __init__(self, config: H2OConfig, table: Table) -> None:
        self._config, self._shared = config, table.prefix_rows
        self._mixed, self._group, self.reach = config.mixed, config.group, config.reach
        self._few = max(1, self.reach)  # longest step that makes room row by row
        self._sinks = max(0, config.protected - self._shared)
        self._most = config.max_kv_size or _UNBOUNDED
        self._plan(table.tokens)

    def _plan(self, ends: Sequence[int]) -> None:
        """Set the budgets of sequences of these lengths, and how long each lasts."""
        steps, last = self._config.rows_at, (_UNBOUNDED, self._most)
        plans = [next((one for one in steps if one[0] >= end), last) for end in ends]
        self._lasting = [tokens for tokens, _ in plans]
        self.budgets = [rows - self._shared for _, rows in plans]
        recent, first = self._config.recent_size or 0, self._config.protected
        shares = ((recent * rows // self._most, rows - first) for _, rows in plans)
        self._recent = [max(min(share), self.reach) for share in shares]
        most = max(self.budgets, default=0)
        # With dense rows, these leave a full tail before new ones arrive.
        dense = self._config.dense_rows + self._group + self.reach
        self.tail_limit = dense if self._mixed else most

    def free(self, table: Table, length: int) -> int:
        """How many tokens, in steps of ``length`` without padding, can be appended before anything
        else is due."""
        lengths, rows = table.lengths, table.tail.rows
        if length > self._few or not min(lengths) or (self._mixed and table.tail.ragged):
            return 0
        left: int = min(map(sub, (*self.budgets, *self._lasting), (*lengths, *table.tokens)))
        return min(left, min(self.tail_limit, table.tail.capacity) - max(rows))

    def surplus(self, table: Table) -> bool:
        """Whether there are rows beyond the budget, left by a chunk."""
        return any(map(gt, table.lengths, self.budgets))

    def make(self, table: Table, counts: Sequence[int]) -> Table:
        """Evict what must go before ``counts`` rows of each sequence are added. Idempotent."""
        if not table.segments:
            return table
        added = max(counts)
        if self._config.rows_at:
            self._plan([*map(add, table.tokens, counts)])
        if self._config.preallocate:
            table.tail.give_back()
        lengths = table.lengths
        both = enumerate(zip(lengths, self.budgets, table.tail.rows, strict=True))
        due = {n: most for n, (rows, most, new) in both if rows > most or new > self.tail_limit}
        if due:
            table = self._evict(table, due, [0] * len(counts))
            lengths = table.lengths
        if self.reach:
            settle(self._config.policy, table, table.tokens[0] + added - self.reach)
        keeps = enumerate(map(self._kept, lengths, counts, self.budgets, self._recent))
        table = self._evict(table, {n: keep for n, keep in keeps if keep < lengths[n]}, counts)
        if self._mixed and added:
            rows, most = table.tail.rows, self.tail_limit
            # Packing rows of one sequence copies those of all: if nothing is ranked, all pack.
            least = most if self._config.max_kv_size else most - self._group + 1
            full = [n for n, new in enumerate(rows) if new >= least] if max(rows) >= most else []
            table = self._evict(table, dict.fromkeys(full, _UNBOUNDED), counts)
        if added <= self._few:
            table.fit(self.tail_limit)
        return table

    def _kept(self, rows: int, added: int, budget: int, recent: int) -> int:
        """How many of a sequence's rows stay when ``added`` rows are coming."""
        need = rows + added - budget
        if need <= 0 or not 0 < added <= self._few:
            return rows
        # Evict a whole group, but only rows that no range protects.
        evictable = rows - self._sinks - max(0, recent - added)
        return rows - max(need, min(self._group, evictable))

    def _evict(self, table: Table, keeps: dict[int, int], counts: Sequence[int]) -> Table:
        """Evict all but the best rows: ``keeps`` has how many stay, by sequence."""
        if not keeps:
            return table
        ends, lengths = [*map(add, table.tokens, counts)], table.lengths
        table.certain = max(table.certain, ends[0] - self.reach)
        tail = max(0, min(table.tail.rows[0], table.tokens[0] - table.certain))
        alike: dict[tuple[int, ...], list[int]] = {}
        for n, keep in keeps.items():
            numbers = self._recent[n], min(keep, lengths[n]), lengths[n], counts[n]
            alike.setdefault(numbers, []).append(n)
        of = partial(Eviction, table, self._config, ends=ends, tail=tail)
        evictions = (
            of(due=due, stay=stay, recent_size=recent) for (recent, stay, *_), due in alike.items()
        )
        if self._mixed:
            return tiers.pack_older(table, [*evictions])
        for one in evictions:
            one.run()
        return table
