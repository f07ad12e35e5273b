"""Which rows are evicted, by policy and protected ranges, and how the others are compacted.

Evicted rows are dropped, or folded into the rows that are most like them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import mlx.core as mx

from ..config import H2OConfig
from ..operations.backends import resolve
from ..operations.composed import beside_rows
from ..operations.composed.buffers import gathered
from ..operations.requests import PerSequence
from ..policies import Rows
from ..policies.weights import best
from .table import BIAS, IMPORTANCE, POSITIONS, Table, behind
from .views import true_rows


@dataclass(eq=False)
class Eviction:
    """One eviction from ``table``, and the ``Rows`` that a policy ranks: read lazily, and once.

    due: sequences that have equally many rows and get equally many; other sequences do not change.
    ends: for each sequence of the table, tokens seen once the coming ones are added.
    stay: how many rows of each stay.
    recent_size: how many tokens, counted back from ``ends``, are protected.
    tail: the newest rows, neither ranked nor evicted, which stay last and in order.
    """

    table: Table
    config: H2OConfig
    due: Sequence[int]
    ends: Sequence[int]
    stay: int
    recent_size: int
    tail: int = 0

    def __post_init__(self) -> None:
        table, config, first = self.table, self.config, self.due[0]
        self.protected = max(0, table.tokens[first] - self.ends[first] + self.recent_size)
        """How many of the newest rows of each sequence are protected."""
        self.skip = 0 if config.light_bits else max(0, config.prefix_size - table.prefix_rows)
        """How many first slots hold rows of a prefix, which are neither ranked nor evicted. 0 with
        light rows, which are not in order."""
        self.sequences = None if len(self.due) == len(table.tokens) else mx.array(list(self.due))
        self._end = table.lengths[first] - self.tail
        # What a policy sees as ``Rows``, besides the properties below.
        self.whole = table.positions
        self.positions = self._some(self.whole)
        self.offset = _of_each(table.tokens, self.due)
        ranked = max(0, self.stay - self.tail)
        self.keep = ranked - self.skip
        sinks = max(0, config.protected - table.prefix_rows)
        self.places = max(0, ranked - sinks - max(0, self.protected - self.tail))
        self.sink_size = config.protected
        self.recent_start = _of_each(self.ends, self.due) - self.recent_size

    def run(self) -> None:
        """Evict. Rows from the end move into the slots of evicted rows; the others do not move."""
        table = self.table
        rows = [self.stay if n in self.due else count for n, count in enumerate(table.lengths)]
        if self.stay == 0:
            table.truncate(rows)
            return
        ranks = self.ranks()
        kept = self.kept(ranks)
        if self.keep and self.config.folds:
            fold_rows(self, ranks, kept)
        sequences = range(table.shape[0]) if self.sequences is None else self.due
        table.beside[POSITIONS] = self.whole
        count, kept = len(table.tail.parts), self.behind_skipped(kept)
        buffers = [*table.tail.parts, *table.beside.values()]
        found = resolve().compact_rows(buffers, kept, sequences, self._end, self.tail)
        table.tail.parts = found[:count]
        table.beside = dict(zip(table.beside, found[count:], strict=True))
        table.truncate(rows)

    def kept(self, ranks: mx.array) -> mx.array:
        """Slots of the best of the ranked rows, uint32 [sequences, H, keep], ascending, counted
        from the first of these rows."""
        if not self.keep:  # all are evicted
            return mx.zeros((*self.positions.shape[:2], 0), mx.uint32)
        return best(cast(Rows, self), ranks, self.keep)

    def behind_skipped(self, kept: mx.array) -> mx.array:
        """Slots that stay: those of a prefix, and ``kept``, which are counted from there."""
        if not self.skip:
            return kept
        before = mx.arange(self.skip, dtype=mx.uint32)[None, None]
        return behind(before, kept + mx.array(self.skip, mx.uint32))

    def ranks(self) -> mx.array:
        """float32 [sequences, H, N]; NaN, which is evicted first, for rows beyond the context that
        the model was trained for."""
        found, context = self.config.policy.rank(cast(Rows, self)), self.config.context_size
        if not context or max(self.ends) - context <= self.config.protected:
            return found
        start = beside_rows(_of_each([end - context for end in self.ends], self.due))
        return mx.where(self.positions < start, mx.nan, found)

    def _some(self, array: mx.array) -> mx.array:
        whole = not self.skip and array.shape[2] == self._end
        array = array if whole else array[:, :, self.skip : self._end]
        return array if self.sequences is None else array[self.sequences]

    @cached_property
    def keys(self) -> mx.array:
        return self._some(true_rows(self.table, "keys"))

    @cached_property
    def values(self) -> mx.array:
        return self._some(true_rows(self.table, "values"))

    @property
    def importance(self) -> mx.array:
        return self.beside(IMPORTANCE)

    def beside(self, name: str) -> mx.array:
        """float32 [sequences, H, N]."""
        there = self.table.beside
        return self._some(there[name] if name in there else self.table.filled(name))


def fold_rows(rows: Eviction, ranks: mx.array, kept: mx.array) -> None:
    """Fold the rows that are not ``kept`` into others, in place; ``kept`` is uint32
    [sequences, H, K], counted from ``rows.skip``.

    Ranks are the weights of rows. Neither sinks nor recent rows change.
    """
    table, policy, some = rows.table, rows.config.policy, rows.sequences
    start = beside_rows(rows.recent_start)
    if BIAS not in table.beside:
        table.attach(BIAS)
    free = (rows.positions >= rows.sink_size) & (rows.positions < start) & policy.takes(ranks)
    own = rows.keys, rows.values, rows.beside(BIAS), rows.importance
    found = resolve().fold(*own, ranks, free, kept, share=policy.fold_share)
    into = found.into + mx.array(rows.skip, mx.uint32) if rows.skip else found.into
    made, frame = (found.keys, found.values), table.frame
    if frame is not None:
        frame = frame if some is None else frame.each(lambda centre: centre[some])
        made = frame.into(*made)
    tail = table.tail
    new = [*tail.keys.encode(made[0]), *tail.values.encode(made[1])]
    pairs = zip(tail.parts, new, strict=True)
    tail.parts = [_written(part, into, one, some) for part, one in pairs]
    table.beside[BIAS] = _written(table.beside[BIAS], into, found.bias, some)
    if policy.needs_scores:
        mass = table.beside[IMPORTANCE]
        table.beside[IMPORTANCE] = _written(mass, into, found.mass, some)


def _written(array: mx.array, slots: mx.array, rows: mx.array, some: mx.array | None) -> mx.array:
    """``array`` with ``rows`` at ``slots`` of ``some`` sequences (None: all)."""
    if some is None:
        return resolve().put_rows(array, slots, rows)
    where = mx.zeros((array.shape[0], *slots.shape[1:]), slots.dtype)
    where[some] = slots
    found = gathered(array, where)  # other sequences keep what they have
    found[some] = rows
    return resolve().put_rows(array, where, found)


def _of_each(numbers: Sequence[int], sequences: Sequence[int]) -> PerSequence:
    some = [numbers[n] for n in sequences]
    return some[0] if len(set(some)) == 1 else mx.array(some, mx.int32)
