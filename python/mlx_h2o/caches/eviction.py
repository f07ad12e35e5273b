"""Which rows go, by a policy and the protected ranges, and how the others close the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from ..config import H2OConfig
from ..operations.backends import resolve
from ..operations.composed import beside_rows
from ..operations.requests import PerSequence
from ..policies import Policy, Rows
from .attention import true_rows
from .merging import merge
from .stored import IMPORTANCE
from .table import Table


class Eviction(NamedTuple):
    """One eviction from ``table``, whose lines have seen ``offsets`` tokens.

    keep: rows that stay of each line in ``due``; the other lines stay as they are.
    recent_start: for each line the first position of its protected recent range.
    tail: the newest rows, which are neither ranked nor evicted, and stay the last ones in order.
    skip: the first slots, of a prefix, which are neither ranked nor evicted.
    context_start: for each line the first position within the context that the model was trained
        for: rows before it go first. Empty while there can be none.
    """

    table: Table
    policy: Policy
    config: H2OConfig
    offsets: Sequence[int]
    due: Sequence[int]
    keep: int
    recent_start: Sequence[int]
    tail: int = 0
    skip: int = 0
    context_start: Sequence[int] = ()

    @property
    def protected(self) -> list[int]:
        """Of each line, how many of the newest rows are protected."""
        both = zip(self.offsets, self.recent_start, strict=True)
        return [max(0, offset - start) for offset, start in both]

    def run(self) -> None:
        """Evict. The rows behind move into the slots of those that go: no more than that moves."""
        table, lengths = self.table, self.table.lengths
        for length in sorted({lengths[line] for line in self.due}):
            due = [line for line in self.due if lengths[line] == length]
            if self.keep == 0:
                rows = [0 if line in due else n for line, n in enumerate(table.lengths)]
                table.truncate(rows)
                continue
            some = due if len(due) < table.lines else None
            lines = range(table.shape[0]) if some is None else some
            for stay in self._stages(length, due):
                positions, ranked = table.positions(self.offsets), table.lengths[due[0]] - self.tail
                first = self.first(positions, ranked, some)
                if self.policy.merges and stay > self.tail:
                    kept, positions = merge(self, first, positions, stay - self.tail, due)
                else:
                    kept = self.kept(first, stay - self.tail, due)
                rows = [stay if line in due else n for line, n in enumerate(table.lengths)]
                table.close_gaps(kept, lines, rows, positions, ranked, self.tail)

    def _stages(self, length: int, due: Sequence[int]) -> Iterator[int]:
        """Rows that stay, one after the other: mergers are few at a time, so that a row of many is
        compared with others as what it has become."""
        protected = max(self.protected[line] for line in due)
        while self.policy.merges:
            free = length - self.config.protected - protected
            if length - self.keep <= max(1, free // 4):
                break
            length -= max(1, free // 4)
            yield length
        yield self.keep

    def first(self, positions: mx.array, count: int, lines: Sequence[int] | None = None) -> Ranked:
        """Of the first ``count`` rows of ``lines``, None: of all, those for a policy to rank."""
        index = None if lines is None else mx.array(list(lines))
        whole = not self.skip and count == positions.shape[2]
        positions = positions if whole else positions[:, :, self.skip : count]
        positions = positions if index is None else positions[index]
        return Ranked(self.table, positions, max(self.offsets), index, self.skip)

    def kept(
        self, rows: Ranked, keep: int, due: Sequence[int], ranks: mx.array | None = None
    ) -> mx.array:
        """Slots uint32 [lines, H, keep], ascending, of the rows that stay of those in ``due``."""
        shape = (*rows.positions.shape[:2], self.skip)
        if keep == self.skip:  # all that is ranked goes
            return mx.broadcast_to(mx.arange(self.skip, dtype=mx.uint32), shape)
        best = resolve().keep_indices(
            self.ranks(rows, due) if ranks is None else ranks,
            rows.positions,
            keep=keep - self.skip,
            sink_size=self.config.protected,
            recent_start=self.start_of(due),
        )
        if not self.skip:
            return best
        before = mx.broadcast_to(mx.arange(self.skip, dtype=mx.uint32), shape)
        return mx.concatenate([before, best + mx.array(self.skip, mx.uint32)], axis=2)

    def start_of(self, due: Sequence[int]) -> PerSequence:
        """The first position of the protected recent range of the lines in ``due``."""
        return _of_lines(self.recent_start, due)

    def ranks(self, rows: Ranked, due: Sequence[int]) -> mx.array:
        """float32 [lines, H, N], of the rows of the lines in ``due``."""
        found = self.policy.rank(cast(Rows, rows))
        if self.config.shared_heads:
            # The same rows in the same slots of every head: NaN in one is NaN in the mean.
            found = mx.broadcast_to(mx.mean(found, axis=1, keepdims=True), found.shape)
        return self.within_context(found, rows.positions, due)

    def within_context(self, array: mx.array, positions: mx.array, due: Sequence[int]) -> mx.array:
        """``array`` [lines, H, N], with NaN for rows that are further back than the context."""
        if not self.context_start:
            return array
        start = beside_rows(_of_lines(self.context_start, due))
        return mx.where(positions < start, mx.nan, array)


def _of_lines(numbers: Sequence[int], lines: Sequence[int]) -> PerSequence:
    some = [numbers[line] for line in lines]
    return some[0] if len(set(some)) == 1 else mx.array(some, mx.int32)


class Ranked(NamedTuple):
    """``Rows``: rows of some lines of a table from slot ``skip`` on, read only as far as a policy
    asks."""

    table: Table
    positions: mx.array
    offset: int
    lines: mx.array | None
    skip: int = 0

    def _some(self, array: mx.array) -> mx.array:
        end = self.skip + self.positions.shape[2]
        whole = not self.skip and array.shape[2] == end
        array = array if whole else array[:, :, self.skip : end]
        return array if self.lines is None else array[self.lines]

    @property
    def keys(self) -> mx.array:
        return self._some(true_rows(self.table, "keys"))

    @property
    def values(self) -> mx.array:
        return self._some(true_rows(self.table, "values"))

    @property
    def importance(self) -> mx.array:
        found = self.table.beside.get(IMPORTANCE)
        if found is None:
            return mx.full(self.positions.shape, mx.nan, mx.float32)
        return self._some(found)
