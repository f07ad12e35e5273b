"""Lines of a table, which are the sequences of a batch: those that leave, and those that join."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..operations.composed.buffers import padded
from .column import Column
from .frame import joined
from .table import NONE, Segment, Table

Change = Callable[[mx.array], mx.array]


def select(table: Table, lines: Sequence[int], offsets: Sequence[int]) -> Table:
    """A copy of some lines, in arrays of their own, without the room that none of them uses."""
    index = mx.array(list(lines))
    rows = [[one.rows[line] for line in lines] for one in table.segments]
    return _stacked([(table, offsets)], rows, lambda array: array[index])


def join(tables: Sequence[Table | None], offsets: Sequence[Sequence[int]]) -> Table | None:
    """The lines of all ``tables``, one behind the other; None: as many without rows."""
    like = next((table for table in tables if table is not None), None)
    if like is None:
        return None
    pairs = [
        (_none_like(like, len(seen)) if table is None else table, seen)
        for table, seen in zip(tables, offsets, strict=True)
        if seen
    ]
    if len(pairs) == 1:
        return pairs[0][0]
    same = zip(*(table.segments for table, _ in pairs), strict=True)
    return _stacked(pairs, [[rows for one in parts for rows in one.rows] for parts in same])


def _stacked(
    pairs: Sequence[tuple[Table, Sequence[int]]],
    rows: Sequence[list[int]],
    change: Change = lambda array: array,
) -> Table:
    """What ``change`` makes of the lines of tables and their offsets, one behind the other: so
    many ``rows`` of each line in each segment, without room for more."""
    tables, widths = [table for table, _ in pairs], [max(one) for one in rows]

    def columns(place: int, side: str) -> Column:
        width = widths[place]
        found: list[Column] = [getattr(table.segments[place], side) for table in tables]
        parts = zip(*(one.parts for one in found), strict=True)
        cut = ([padded(change(part)[:, :, :width], width, 0) for part in same] for same in parts)
        return found[0].like(tuple(mx.concatenate(same) for same in cut))

    found = Table(
        [Segment(columns(n, "keys"), columns(n, "values"), one) for n, one in enumerate(rows)],
        joined([table.frame and table.frame.each(change) for table in tables]),
    )
    places = [_spread(one, change(one.positions(seen)), widths, NONE) for one, seen in pairs]
    found.place(mx.concatenate(places))
    for name in dict.fromkeys(name for table in tables for name in table.beside):
        like = next(table for table in tables if name in table.beside)
        array, fill = like.beside[name], like.fills[name]
        for table in tables:
            if name not in table.beside:
                none = mx.zeros((*table.shape, 0, *array.shape[3:]), array.dtype)
                table.attach(name, none, fill)
        arrays = [_spread(table, change(table.beside[name]), widths, fill) for table in tables]
        found.fills[name], found.beside[name] = fill, mx.concatenate(arrays)
    return found


def _none_like(table: Table, lines: int) -> Table:
    """Lines without rows, kept as those of a table."""

    def none(array: mx.array) -> mx.array:
        return mx.zeros((lines, array.shape[1], 0, *array.shape[3:]), array.dtype)

    found = table.each(none, [0] * lines)
    found.frame = table.frame and table.frame.each(
        lambda one: mx.zeros((lines, *one.shape[1:]), one.dtype)
    )
    return found


def _spread(table: Table, array: mx.array, widths: Sequence[int], fill: float) -> mx.array:
    """An array of all slots of a table, in segments of other widths."""
    parts, start = [], 0
    for one, width in zip(table.segments, widths, strict=True):
        parts.append(padded(array[:, :, start : start + min(one.width, width)], width, fill))
        start += one.width
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
