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
        lines: Sequence[int] = due if len(due) < table.lines else range(table.shape[0])
        some = mx.array(list(due)) if len(due) < table.lines else None
        first = positions if ranked == positions.shape[2] else positions[:, :, :ranked]
        kept = self.kept(first, self.keep - self.tail, due, some)
        table.close_gaps(kept, lines, rows, positions, ranked, self.tail)

    def kept(
        self,
        positions: mx.array,
        keep: int,
        due: Sequence[int],
        lines: mx.array | None = None,
        ranks: mx.array | None = None,
    ) -> mx.array:
        """Slots uint32 [lines, H, keep], ascending, of the first rows that stay of those in
        ``due``, which are ``lines`` of the table, None: all."""
        if keep == 0:  # all but the tail goes
            batch = positions.shape[0] if lines is None else lines.size
            return mx.zeros((batch, positions.shape[1], 0), mx.uint32)
        if ranks is None:
            ranks = self.ranks(positions, lines)
        starts = [self.recent_start[line] for line in due]
        return resolve().keep_indices(
            ranks,
            positions if lines is None else positions[lines],
            keep=keep,
            sink_size=self.sink_size,
            recent_start=starts[0] if len(set(starts)) == 1 else mx.array(starts, mx.int32),
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
        return self._some(self._table.dense("keys"))

    @property
    def values(self) -> mx.array:
        return self._some(self._table.dense("values"))

    @property
    def importance(self) -> mx.array:
        found = self._table.beside.get("importance")
        if found is None:
            return mx.full(self.positions.shape, mx.nan, mx.float32)
        return self._some(found)
