"""Which rows are evicted, by policy and protected ranges, and how the others are compacted.

Evicted rows are dropped, or folded into the rows that are most like them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, cast

import mlx.core as mx

from ..config import H2OConfig
from ..operations.backends import resolve
from ..operations.composed import beside_rows
from ..operations.composed.buffers import gathered
from ..operations.requests import PerSequence
from ..policies import Policy, Rows
from .table import BIAS, FILLS, IMPORTANCE, Table, behind
from .views import true_rows


class Eviction(NamedTuple):
    """One eviction from ``table``.

    keep: rows to keep in each sequence in ``due``; other sequences do not change.
    ends: for each sequence, tokens seen once the coming ones are added.
    sinks: the table's own rows at the first positions, which are never evicted.
    recent_size: how many tokens, counted back from ``ends``, are protected.
    tail: the newest rows, neither ranked nor evicted, which stay last and in order.
    """

    table: Table
    config: H2OConfig
    due: Sequence[int]
    keep: int
    ends: Sequence[int]
    sinks: int
    recent_size: int
    tail: int = 0

    @property
    def protected(self) -> list[int]:
        """For each sequence, how many of its newest rows are protected."""
        both = zip(self.table.tokens, self.ends, strict=True)
        return [max(0, seen - end + self.recent_size) for seen, end in both]

    @property
    def skip(self) -> int:
        """How many first slots hold rows of a prefix, which are neither ranked nor evicted. 0 in
        mixed precision, where rows are not in order."""
        config = self.config
        return 0 if config.mixed else max(0, config.prefix_size - self.table.prefix_rows)

    def run(self) -> None:
        """Evict. Rows from the end move into the slots of evicted rows; the others do not move."""
        table, alike = self.table, list(zip(self.table.lengths, self.protected, strict=True))
        for numbers in sorted({alike[n] for n in self.due}):
            due = [n for n in self.due if alike[n] == numbers]
            rows = [self.keep if n in due else count for n, count in enumerate(table.lengths)]
            if self.keep == 0:
                table.truncate(rows)
                continue
            ranked = numbers[0] - self.tail
            first = Ranked(self, due, numbers[0], self.tail)
            ranks = self.ranks(first)
            kept = self.kept(first, ranks)
            if first.keep and self.config.folds:
                fold_rows(table, self.config.policy, first, ranks, kept)
            if skip := first.skip:  # these stay, and ``kept`` is counted from there
                before = mx.arange(skip, dtype=mx.uint32)[None, None]
                kept = behind(before, kept + mx.array(skip, mx.uint32))
            sequences = range(table.shape[0]) if first.sequences is None else due
            table.close_gaps(kept, first.whole, sequences, rows, ranked, self.tail)

    def kept(self, rows: Ranked, ranks: mx.array) -> mx.array:
        """Slots of the best of these rows, uint32 [sequences, H, keep], ascending, counted from the
        first of these rows."""
        if not rows.keep:  # all are evicted
            return mx.zeros((*rows.positions.shape[:2], 0), mx.uint32)
        return resolve().keep_indices(
            ranks, rows.positions,
            keep=rows.keep, sink_size=rows.sink_size, recent_start=rows.recent_start,
        )  # fmt: skip

    def ranks(self, rows: Ranked) -> mx.array:
        """float32 [sequences, H, N]; NaN, which is evicted first, for rows beyond the context that
        the model was trained for."""
        found, context = self.config.policy.rank(cast(Rows, rows)), self.config.context_size
        if not context or max(self.ends) - context <= self.config.protected:
            return found
        start = beside_rows(_of_each([end - context for end in self.ends], rows.due))
        return mx.where(rows.positions < start, mx.nan, found)


class Ranked:
    """``Rows`` for a policy: of the sequences in ``due``, which each have ``held`` rows, all but
    the last ``tail`` and those to skip; read lazily, and once. ``whole``: the positions of all."""

    def __init__(self, eviction: Eviction, due: Sequence[int], held: int, tail: int) -> None:
        table, keep = eviction.table, max(0, min(eviction.keep, held) - tail)
        recent = max(0, eviction.protected[due[0]] - tail)
        self._table, self._end, self.skip, self.due = table, held - tail, eviction.skip, due
        self.sequences = None if len(due) == len(table.tokens) else mx.array(list(due))
        self.whole = table.positions
        self.positions = self._some(self.whole)
        self.offset = _of_each(table.tokens, due)
        self.keep = keep - eviction.skip
        self.places = max(0, keep - eviction.sinks - recent)
        self.sink_size = eviction.config.protected
        self.recent_start = _of_each(eviction.ends, due) - eviction.recent_size

    def _some(self, array: mx.array) -> mx.array:
        whole = not self.skip and array.shape[2] == self._end
        array = array if whole else array[:, :, self.skip : self._end]
        return array if self.sequences is None else array[self.sequences]

    @cached_property
    def keys(self) -> mx.array:
        return self._some(true_rows(self._table, "keys"))

    @cached_property
    def values(self) -> mx.array:
        return self._some(true_rows(self._table, "values"))

    @property
    def importance(self) -> mx.array:
        return self.beside(IMPORTANCE)

    def beside(self, name: str) -> mx.array:
        """float32 [sequences, H, N]."""
        found = self._table.beside.get(name)
        if found is None:
            return mx.full(self.positions.shape, FILLS[name], mx.float32)
        return self._some(found)


def fold_rows(table: Table, policy: Policy, rows: Ranked, ranks: mx.array, kept: mx.array) -> None:
    """Fold the rows that are not ``kept`` into others, in place; ``kept`` is uint32
    [sequences, H, K], counted from ``rows.skip``.

    Ranks are the weights of rows. Neither sinks nor recent rows change.
    """
    start, some = beside_rows(rows.recent_start), rows.sequences
    if BIAS not in table.beside:
        table.attach(BIAS)
    free = (rows.positions >= rows.sink_size) & (rows.positions < start) & policy.takes(ranks)
    found = resolve().fold(
        rows.keys, rows.values, rows.beside(BIAS), rows.importance, ranks, free, kept,
        share=policy.fold_share,
    )  # fmt: skip
    into = found.into + mx.array(rows.skip, mx.uint32) if rows.skip else found.into
    made, frame = (found.keys, found.values), table.frame
    if frame is not None:
        own = frame if some is None else frame.each(lambda centre: centre[some])
        made = own.into(*made)
    tail = table.tail
    new = [*tail.keys.encode(made[0]), *tail.values.encode(made[1])]
    pairs = zip(tail.parts, new, strict=True)
    tail.parts = [_written(part, into, one, some) for part, one in pairs]
    for name, one in ((IMPORTANCE, found.mass), (BIAS, found.bias)):
        table.beside[name] = _written(table.beside[name], into, one, some)


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
