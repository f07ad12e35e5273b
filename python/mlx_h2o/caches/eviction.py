"""Which rows go, by a policy and the protected ranges, and how the remaining ones are compacted.

Rows that go are dropped, or become part of the rows that are most like them.
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

    keep: rows that stay of each sequence in ``due``; the others stay as they are.
    ends: of each sequence, the tokens seen when those that come are there.
    sinks: own rows of the first positions, which stay.
    recent_size: the newest of these tokens are protected.
    tail: the newest rows, which are neither ranked nor evicted, and stay the last ones in order.
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
        """Of each sequence, how many of the newest rows are protected."""
        both = zip(self.table.tokens, self.ends, strict=True)
        return [max(0, seen - end + self.recent_size) for seen, end in both]

    @property
    def skip(self) -> int:
        """The first slots, of a prefix, which are neither ranked nor evicted. Rows of mixed
        precision are not in order."""
        config = self.config
        return 0 if config.mixed else max(0, config.prefix_size - self.table.prefix_rows)

    def run(self) -> None:
        """Evict. The rows behind move into the slots of those that go: no more than that moves."""
        table, alike = self.table, list(zip(self.table.lengths, self.protected, strict=True))
        for numbers in sorted({alike[n] for n in self.due}):
            due = [n for n in self.due if alike[n] == numbers]
            rows = [self.keep if n in due else count for n, count in enumerate(table.lengths)]
            if self.keep == 0:
                table.truncate(rows)
                continue
            ranked = table.lengths[due[0]] - self.tail
            first = Ranked(self, due, ranked)
            ranks = self.ranks(first)
            kept = self.kept(first, ranks)
            if first.keep and self.config.folds:
                fold_rows(table, self.config.policy, first, ranks, kept)
            if skip := first.skip:  # which stay, and from which on slots were counted
                before = mx.arange(skip, dtype=mx.uint32)[None, None]
                kept = behind(before, kept + mx.array(skip, mx.uint32))
            sequences = range(table.shape[0]) if first.sequences is None else due
            table.close_gaps(kept, first.whole, sequences, rows, ranked, self.tail)

    def kept(self, rows: Ranked, ranks: mx.array) -> mx.array:
        """Slots uint32 [sequences, H, keep], ascending, of the best of these rows, counted from the
        first of them."""
        if not rows.keep:  # all of them go
            return mx.zeros((*rows.positions.shape[:2], 0), mx.uint32)
        return resolve().keep_indices(
            ranks, rows.positions,
            keep=rows.keep, sink_size=rows.sink_size, recent_start=rows.recent_start,
        )  # fmt: skip

    def ranks(self, rows: Ranked) -> mx.array:
        """float32 [sequences, H, N]; of rows beyond the context that the model was trained for,
        which go first, NaN."""
        found, context = self.config.policy.rank(cast(Rows, rows)), self.config.context_size
        if not context or max(self.ends) - context <= self.config.protected:
            return found
        start = beside_rows(_of_each([end - context for end in self.ends], rows.due))
        return mx.where(rows.positions < start, mx.nan, found)


class Ranked:
    """``Rows``: the first ``count`` rows of the sequences in ``due``, which are alike, behind those
    to skip; read only as far as someone asks, and once. ``whole`` are positions of all rows."""

    def __init__(self, eviction: Eviction, due: Sequence[int], count: int) -> None:
        table, held = eviction.table, eviction.table.lengths[due[0]]
        tail = max(0, held - count)
        keep = max(0, min(eviction.keep, held) - tail)
        recent = max(0, eviction.protected[due[0]] - tail)
        self._table, self._end, self.skip, self.due = table, count, eviction.skip, due
        self.sequences = None if len(due) == len(table.tokens) else mx.array(list(due))
        self.whole = table.positions
        self.positions = self._some(self.whole)
        self.offset = max(table.tokens)
        self.keep = keep - eviction.skip
        self.places = max(0, keep - eviction.sinks - recent)
        self.sink_size = eviction.config.protected
        starts = [end - eviction.recent_size for end in eviction.ends]
        self.recent_start = _of_each(starts, due)

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
    """Fold those of these rows that are not ``kept``, uint32 [sequences, H, K] counted from
    ``rows.skip``, into others, in place.

    Rows are weighed by their ranks. Neither sinks nor recent rows change.
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
    """``rows`` at ``slots`` of some sequences, None: of all."""
    if some is None:
        return resolve().put_rows(array, slots, rows)
    where = mx.zeros((array.shape[0], *slots.shape[1:]), slots.dtype)
    where[some] = slots
    found = gathered(array, where)  # of the other sequences what is there
    found[some] = rows
    return resolve().put_rows(array, where, found)


def _of_each(numbers: Sequence[int], sequences: Sequence[int]) -> PerSequence:
    some = [numbers[n] for n in sequences]
    return some[0] if len(set(some)) == 1 else mx.array(some, mx.int32)
