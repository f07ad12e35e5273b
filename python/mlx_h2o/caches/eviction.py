"""Which rows go, by a policy and the protected ranges, and how the others close the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from ..operations.backends import resolve
from ..policies import Policy, Rows
from .table import Table

__all__ = ["Eviction"]


class Eviction(NamedTuple):
    """One eviction from ``table``, whose lines have seen ``offsets`` tokens.

    keep: rows that stay of each line in ``due``; the other lines stay as they are.
    recent_start: for each line the first position of its protected recent range.
    tail: the newest rows, which are neither ranked nor evicted, and stay the last ones in order.
    """

    table: Table
    policy: Policy
    offsets: Sequence[int]
    due: Sequence[int]
    keep: int
    sink_size: int
    recent_start: Sequence[int]
    tail: int = 0
    shared_heads: bool = False

    @property
    def protected(self) -> list[int]:
        """Of each line, how many of the newest rows are protected."""
        both = zip(self.offsets, self.recent_start, strict=True)
        return [max(0, offset - start) for offset, start in both]

    def run(self) -> None:
        """Evict. The rows behind move into the slots of those that go: no more than that moves."""
        lengths = self.table.lengths
        for length in sorted({lengths[line] for line in self.due}):
            self._run([line for line in self.due if lengths[line] == length], length)

    def _run(self, due: Sequence[int], length: int) -> None:
        """Of lines with so many rows each."""
        table = self.table
        rows = [self.keep if line in due else n for line, n in enumerate(table.lengths)]
        if self.keep == 0:
            table.truncate(rows)
            return
        positions, ranked = table.positions(self.offsets), length - self.tail
        alike = self._replace(due=due)
        some = None if len(due) == table.lines else mx.array(list(due))
        kept = alike.kept(positions[:, :, :ranked], self.keep - self.tail, some)
        lines = range(table.shape[0]) if some is None else due
        table.close_gaps(kept, list(lines), rows, positions, ranked, self.tail)

    def kept(self, positions: mx.array, keep: int, lines: mx.array | None = None) -> mx.array:
        """Slots uint32 [lines, H, keep], ascending, of the first rows that stay."""
        if keep == 0:  # all but the tail goes
            batch = positions.shape[0] if lines is None else lines.size
            return mx.zeros((batch, positions.shape[1], 0), mx.uint32)
        ranks = self.ranks(positions, lines)
        start = [self.recent_start[line] for line in self.due]
        return resolve().keep_indices(
            ranks,
            positions if lines is None else positions[lines],
            keep=keep,
            sink_size=self.sink_size,
            recent_start=start[0] if len(set(start)) == 1 else mx.array(start, mx.int32),
        )

    def ranks(self, positions: mx.array, lines: mx.array | None = None) -> mx.array:
        """float32 [lines, H, N] of the first N rows."""
        found = self.policy.rank(
            cast(Rows, TableRows(self.table, positions, max(self.offsets), lines))
        )
        if self.shared_heads:
            # The same rows in the same slots of every head: NaN in one is NaN in the mean.
            found = mx.broadcast_to(mx.mean(found, axis=1, keepdims=True), found.shape)
        return found


class TableRows:
    """``Rows``: the first rows of some lines of a table, read only as far as a policy asks."""

    def __init__(
        self, table: Table, positions: mx.array, offset: int, lines: mx.array | None = None
    ) -> None:
        self._table, self._lines, self._length = table, lines, positions.shape[2]
        self.positions = positions if lines is None else positions[lines]
        self.offset = offset

    def _some(self, array: mx.array) -> mx.array:
        array = array if array.shape[2] == self._length else array[:, :, : self._length]
        return array if self._lines is None else array[self._lines]

    @property
    def keys(self) -> mx.array:
        return self._some(self._table.dense(("keys",))[0])

    @property
    def values(self) -> mx.array:
        return self._some(self._table.dense(("values",))[0])

    @property
    def importance(self) -> mx.array:
        found = self._table.beside.get("importance")
        if found is None:
            return mx.full(self.positions.shape, mx.nan, mx.float32)
        return self._some(found)
