"""An eviction that folds: rows that go become part of the rows that are most like them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.composed import beside_rows, folding
from ..operations.composed.buffers import gathered
from ..policies import Policy
from .ranked import Ranked
from .stored import BIAS, IMPORTANCE
from .table import Table


def fold(
    table: Table,
    policy: Policy,
    rows: Ranked,
    ranks: mx.array,
    kept: mx.array,
    due: Sequence[int],
) -> None:
    """Fold those of these rows of the lines in ``due`` that are not ``kept``, uint32 [lines, H, K]
    counted from ``rows.skip``, into others, in place.

    Rows are weighed by their ranks. Neither sinks nor recent rows change.
    """
    start = beside_rows(rows.recent_start)
    for name, fill in ((IMPORTANCE, mx.nan), (BIAS, 0.0)):
        if name not in table.beside:
            table.attach(name, mx.zeros((*table.shape, 0)), fill)
    free = (rows.positions >= rows.sink_size) & (rows.positions < start) & policy.takes(ranks)
    found = resolve().function(folding.fold)(
        rows.keys, rows.values, rows.bias, rows.importance, ranks, free, kept,
        share=policy.fold_share,
    )  # fmt: skip
    into = found.into + mx.array(rows.skip, mx.uint32) if rows.skip else found.into
    lines = None if rows.lines is None else due
    made, frame = (found.keys, found.values), table.frame
    if frame is not None:
        own = frame if rows.lines is None else frame.each(lambda centre: centre[rows.lines])
        made = own.into(*made)
    for column, new in zip((table.tail.keys, table.tail.values), made, strict=True):
        pairs = zip(column.parts, column.encode(new), strict=True)
        column.parts = tuple(_written(part, into, some, lines) for part, some in pairs)
    for name, new in ((IMPORTANCE, found.mass), (BIAS, found.bias)):
        table.beside[name] = _written(table.beside[name], into, new, lines)


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
