"""An eviction that merges: rows that go become part of the rows that are most like them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from ..operations import merging
from ..operations.backends import resolve
from ..operations.buffers import gathered
from .stored import IMPORTANCE

if TYPE_CHECKING:
    from .eviction import Eviction, Ranked


def merge(
    eviction: Eviction, rows: Ranked, positions: mx.array, keep: int, due: Sequence[int]
) -> tuple[mx.array, mx.array]:
    """Merge all but ``keep`` of these rows into others, which change in place; ``positions`` are
    those of all rows before.

    Returns:
        The slots that stay, uint32 [lines, H, keep], and the positions of all rows then.
    """
    table, config = eviction.table, eviction.config
    if IMPORTANCE not in table.beside:
        table.attach(IMPORTANCE, mx.zeros((*table.shape, 0)), 0.0)
    bias = eviction.within_context(rows.importance, rows.positions, due)
    found = resolve().function(merging.mergers)(
        rows.keys, rows.values, bias, rows.positions, keep=keep,
        sink_size=config.protected, recent_start=eviction.start_of(due),
        shared=config.shared_heads,
    )  # fmt: skip
    into, lines = found.into, None if rows.lines is None else due
    made = found.keys, found.values
    if table.frame is not None:
        made = table.frame.into(*made)
    for column, new in zip((table.tail.keys, table.tail.values), made, strict=True):
        pairs = zip(column.parts, column.encode(new), strict=True)
        column.parts = tuple(_written(part, into, some, lines) for part, some in pairs)
    table.beside[IMPORTANCE] = _written(table.beside[IMPORTANCE], into, found.bias, lines)
    return found.kept, _written(positions, into, found.positions, lines)


def _written(
    array: mx.array, slots: mx.array, rows: mx.array, lines: Sequence[int] | None
) -> mx.array:
    """``rows`` at ``slots`` of some lines, None: of all."""
    if lines is None:
        return resolve().put_rows(array, slots, rows)
    index = mx.array(list(lines))
    where = mx.zeros((array.shape[0], *slots.shape[1:]), slots.dtype)
    where[index] = slots
    found = gathered(array, where)  # of the other lines what is there
    found[index] = rows
    return resolve().put_rows(array, where, found)
