"""When a cache evicts rows, and how many, according to its settings."""

from collections.abc import Sequence
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
    """

    def __init__(self, config: H2OConfig, table: Table) -> None:
        self._config, self._shared = config, table.prefix_rows
        self._few = max(1, config.reach)  # longest step that makes room row by row
        self._sinks = max(0, config.protected - self._shared)
        self._plan(table.tokens)

    def _plan(self, ends: Sequence[int]) -> None:
        """Set the budgets of sequences of these lengths, and how long each lasts."""
        config, usual = self._config, self._config.max_kv_size or _UNBOUNDED
        steps = *config.rows_at, (_UNBOUNDED, usual)
        plans = [next(one for one in steps if one[0] >= end) for end in ends]
        self._lasting = [tokens for tokens, _ in plans]
        self.budgets = [rows - self._shared for _, rows in plans]
        recent, first = config.recent_size or 0, config.protected
        shares = ((recent * rows // usual, rows - first) for _, rows in plans)
        self._recent = [max(min(share), config.reach) for share in shares]
        # With dense rows, these leave a full tail before new ones arrive.
        dense = config.dense_rows + config.group + config.reach
        self.tail_limit = dense if config.mixed else max(self.budgets, default=0)

    def free(self, table: Table, length: int) -> int:
        """How many tokens, in steps of ``length`` without padding, can be appended before anything
        else is due."""
        lengths, rows = table.lengths, table.tail.rows
        if length > self._few or not min(lengths) or (self._config.mixed and table.tail.ragged):
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
        added, config = max(counts), self._config
        if config.rows_at:
            self._plan([*map(add, table.tokens, counts)])
        if config.preallocate:
            table.tail.give_back()
        lengths = table.lengths
        both = enumerate(zip(lengths, self.budgets, table.tail.rows, strict=True))
        due = {n: most for n, (rows, most, new) in both if rows > most or new > self.tail_limit}
        if due:
            table = self._evict(table, due, [0] * len(counts))
            lengths = table.lengths
        if config.reach:
            settle(config.policy, table, table.tokens[0] + added - config.reach)
        keeps = enumerate(map(self._kept, lengths, counts, self.budgets, self._recent))
        table = self._evict(table, {n: keep for n, keep in keeps if keep < lengths[n]}, counts)
        if config.mixed and added:
            rows, most = table.tail.rows, self.tail_limit
            # Packing rows of one sequence copies those of all: if nothing is ranked, all pack.
            least = most if config.max_kv_size else most - config.group + 1
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
        return rows - max(need, min(self._config.group, evictable))

    def _evict(self, table: Table, keeps: dict[int, int], counts: Sequence[int]) -> Table:
        """Evict all but the best rows: ``keeps`` has how many stay, by sequence."""
        if not keeps:
            return table
        ends, lengths = [*map(add, table.tokens, counts)], table.lengths
        table.certain = max(table.certain, ends[0] - self._config.reach)
        tail = max(0, min(table.tail.rows[0], table.tokens[0] - table.certain))
        alike: dict[tuple[int, ...], list[int]] = {}
        for n, keep in keeps.items():
            numbers = self._recent[n], min(keep, lengths[n]), lengths[n], counts[n]
            alike.setdefault(numbers, []).append(n)
        evictions = (
            Eviction(table, self._config, due, ends, stay=stay, recent_size=recent, tail=tail)
            for (recent, stay, *_), due in alike.items()
        )
        if self._config.mixed:
            return tiers.pack_older(table, [*evictions])
        for one in evictions:
            one.run()
        return table
