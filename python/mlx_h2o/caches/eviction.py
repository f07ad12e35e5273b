"""Which rows go, by a policy and the protected ranges, and how the others close the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from ..config import H2OConfig
from ..operations.backends import resolve
from ..operations.composed import beside_rows
from ..operations.requests import PerSequence
from ..policies import Policy, Rows
from .folding import fold
from .ranked import Ranked
from .table import Table


class Eviction(NamedTuple):
    """One eviction from ``table``, whose lines have seen ``offsets`` tokens.

    keep: rows that stay of each line in ``due``; the other lines stay as they are.
    recent_start: for each line the first position of its protected recent range.
    tail: the newest rows, which are neither ranked nor evicted, and stay the last ones in order.
    skip: the first slots, of a prefix, which are neither ranked nor evicted.
    sinks: rows of the first positions, which stay, ``skip`` included.
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
    sinks: int = 0
    context_start: Sequence[int] = ()

    @property
    def protected(self) -> list[int]:
        """Of each line, how many of the newest rows are protected."""
        both = zip(self.offsets, self.recent_start, strict=True)
        return [max(0, offset - start) for offset, start in both]

    def run(self) -> None:
        """Evict. The rows behind move into the slots of those that go: no more than that moves."""
        table, alike = self.table, list(zip(self.table.lengths, self.protected, strict=True))
        for numbers in sorted({alike[line] for line in self.due}):
            due = [line for line in self.due if alike[line] == numbers]
            if self.keep == 0:
                rows = [0 if line in due else n for line, n in enumerate(table.lengths)]
                table.truncate(rows)
                continue
            some = due if len(due) < table.lines else None
            lines = range(table.shape[0]) if some is None else some
            positions, ranked = table.positions(self.offsets), table.lengths[due[0]] - self.tail
            first = self.first(positions, ranked, due, some)
            ranks = self.ranks(first, due) if first.keep else None
            kept = self.kept(first, ranks)
            if ranks is not None and self.config.folds:
                fold(table, self.policy, first, ranks, kept, due)
            kept = self.with_skipped(kept)
            rows = [self.keep if line in due else n for line, n in enumerate(table.lengths)]
            table.close_gaps(kept, lines, rows, positions, ranked, self.tail)

    def first(
        self,
        positions: mx.array,
        count: int,
        due: Sequence[int],
        lines: Sequence[int] | None = None,
    ) -> Ranked:
        """Of the first ``count`` rows of ``lines``, None: of all, those for a policy to rank, as
        those in ``due`` are."""
        width, index = positions.shape[2], None if lines is None else mx.array(list(lines))
        whole = not self.skip and count == width
        positions = positions if whole else positions[:, :, self.skip : count]
        positions = positions if index is None else positions[index]
        tail = max(0, self.table.lengths[due[0]] - count)
        recent = max(0, self.protected[due[0]] - tail)
        keep = max(0, min(self.keep, self.table.lengths[due[0]]) - tail)
        return Ranked(
            table=self.table,
            positions=positions,
            offset=max(self.offsets),
            lines=index,
            skip=self.skip,
            keep=keep - self.skip,
            places=max(0, keep - self.sinks - recent),
            sink_size=self.config.protected,
            recent_start=_of_lines(self.recent_start, due),
        )

    def kept(self, rows: Ranked, ranks: mx.array | None) -> mx.array:
        """Slots uint32 [lines, H, keep], ascending, of the best of these rows, counted from the
        first of them; None: all of them go."""
        if ranks is None:
            return mx.zeros((*rows.positions.shape[:2], 0), mx.uint32)
        return resolve().keep_indices(
            ranks,
            rows.positions,
            keep=rows.keep,
            sink_size=rows.sink_size,
            recent_start=rows.recent_start,
        )

    def with_skipped(self, kept: mx.array) -> mx.array:
        """These slots, counted from the first of the table, behind those of the prefix."""
        if not self.skip:
            return kept
        before = mx.broadcast_to(
            mx.arange(self.skip, dtype=mx.uint32), (*kept.shape[:2], self.skip)
        )
        return mx.concatenate([before, kept + mx.array(self.skip, mx.uint32)], axis=2)

    def ranks(self, rows: Ranked, due: Sequence[int]) -> mx.array:
        """float32 [lines, H, N], of the rows of the lines in ``due``."""
        found = self.policy.rank(cast(Rows, rows))
        if self.config.shared_heads:
            # The same rows in the same slots of every head: NaN in one is NaN in the mean.
            found = mx.broadcast_to(mx.mean(found, axis=1, keepdims=True), found.shape)
        if not self.context_start:
            return found
        start = beside_rows(_of_lines(self.context_start, due))
        return mx.where(rows.positions < start, mx.nan, found)


def _of_lines(numbers: Sequence[int], lines: Sequence[int]) -> PerSequence:
    some = [numbers[line] for line in lines]
    return some[0] if len(set(some)) == 1 else mx.array(some, mx.int32)
