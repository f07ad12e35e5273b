"""Which rows go, by a policy and the protected ranges, and how the others close the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .. import fast
from ..policies import Policy, Rows
from .table import Table

__all__ = ["Eviction", "ranked"]


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

    def run(self) -> None:
        """Evict. The rows behind move into the slots of those that go: no more than that moves."""
        table, due = self.table, set(self.due)
        rows = [self.keep if line in due else n for line, n in enumerate(table.lengths)]
        if self.keep == 0:
            table.truncate(rows)
            return
        positions = table.positions(self.offsets)
        some = None if len(due) == table.lines else mx.array(list(self.due))
        length, keep = table.width - self.tail, self.keep - self.tail
        moves = self._moves(self.kept(positions[:, :, :length], keep, some), length, keep)
        if some is not None:  # rows of the other lines stay where they are
            still = mx.arange(moves[0].shape[2], dtype=mx.uint32)
            still = mx.broadcast_to(still, (*table.shape, still.shape[0]))
            moves = _with(still, some, moves[0]), _with(still, some, moves[1])
        table.move(*moves, rows, positions)

    def kept(self, positions: mx.array, keep: int, lines: mx.array | None = None) -> mx.array:
        """Slots uint32 [lines, H, keep], ascending, of the first rows that stay."""
        ranks = self.ranks(positions, lines)
        start = [self.recent_start[line] for line in self.due]
        return fast.keep_indices(
            ranks,
            positions if lines is None else positions[lines],
            keep=keep,
            sink_size=self.sink_size,
            recent_start=start[0] if len(set(start)) == 1 else mx.array(start, mx.int32),
        )

    def ranks(self, positions: mx.array, lines: mx.array | None = None) -> mx.array:
        """float32 [lines, H, N] of the first N rows."""
        found = ranked(self.table, self.policy, positions, max(self.offsets), lines)
        if self.shared_heads:
            # The same rows in the same slots of every head: NaN in one is NaN in the mean.
            found = mx.broadcast_to(mx.mean(found, axis=1, keepdims=True), found.shape)
        return found

    def _moves(self, kept: mx.array, length: int, keep: int) -> tuple[mx.array, mx.array]:
        """From which slots, and to which, rows move; a row that moves to its own slot stays."""
        count = min(keep, length - keep)
        # From the back: first the rows that lie beyond what stays, then some that stay in place.
        source = kept[:, :, keep - count :][:, :, ::-1]
        slots = mx.arange(keep, dtype=mx.uint32)
        marks = mx.zeros((*kept.shape[:2], length), mx.uint32)
        marks = mx.put_along_axis(marks, kept, mx.array(keep, mx.uint32), axis=2)
        holes = mx.sort(marks[:, :, :keep] + slots, axis=2)[:, :, :count]
        target = mx.where(source >= keep, holes, source)
        if self.tail:
            newest = mx.arange(self.tail, dtype=mx.uint32)
            newest = mx.broadcast_to(newest, (*kept.shape[:2], self.tail))
            source = mx.concatenate([source, newest + length], axis=2)
            target = mx.concatenate([target, newest + keep], axis=2)
        return source, target


def ranked(
    table: Table, policy: Policy, positions: mx.array, offset: int, lines: mx.array | None = None
) -> mx.array:
    """float32 [lines, H, N]: the ranks of the first N rows, whose ``positions`` these are."""
    length = positions.shape[2]

    def some(array: mx.array) -> mx.array:
        array = array if array.shape[2] == length else array[:, :, :length]
        return array if lines is None else array[lines]

    keys, values = table.dense()
    importance = table.beside.get("importance")
    if importance is None:
        importance = mx.full(positions.shape, mx.nan, mx.float32)
    return policy.rank(Rows(some(keys), some(values), some(importance), some(positions), offset))


def _with(whole: mx.array, lines: mx.array, some: mx.array) -> mx.array:
    whole = whole[...]
    whole[lines] = some
    return whole
