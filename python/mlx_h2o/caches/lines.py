"""Lines of a table, which are the sequences of a batch: those that leave, and those that join."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..operations.buffers import padded
from .column import Column
from .table import NONE, Segment, Table


def select(table: Table, lines: Sequence[int], offsets: Sequence[int]) -> Table:
    """A copy of some lines, in arrays of their own, without the room that none of them uses."""
    some = list(lines)
    index = mx.array(some)
    widths = [max(one.rows[line] for line in some) for one in table.segments]
    segments = [
        Segment(
            _chosen(one.keys, index, width),
            _chosen(one.values, index, width),
            [one.rows[line] for line in some],
        )
        for one, width in zip(table.segments, widths, strict=True)
    ]
    found = Table(segments)
    found.place(_spread(table, table.positions(offsets)[index], widths, NONE))
    found.fills = dict(table.fills)
    found.beside = {
        name: _spread(table, array[index], widths, 0) for name, array in table.beside.items()
    }
    return found


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
    return _joined(pairs) if len(pairs) > 1 else pairs[0][0]


def _joined(pairs: Sequence[tuple[Table, Sequence[int]]]) -> Table:
    tables = [table for table, _ in pairs]
    segments = []
    for parts in zip(*(table.segments for table in tables), strict=True):
        width = max(one.width for one in parts)
        keys = _stacked([one.keys for one in parts], width)
        values = _stacked([one.values for one in parts], width)
        segments.append(Segment(keys, values, [rows for one in parts for rows in one.rows]))
    found = Table(segments)
    widths = [one.width for one in segments]
    arrays = [_spread(table, table.positions(seen), widths, NONE) for table, seen in pairs]
    found.place(mx.concatenate(arrays))
    for name in dict.fromkeys(name for table in tables for name in table.beside):
        like = next(table for table in tables if name in table.beside)
        array, fill = like.beside[name], like.fills[name]
        for table in tables:
            if name not in table.beside:
                none = mx.zeros((*table.shape, 0, *array.shape[3:]), array.dtype)
                table.attach(name, none, fill)
        arrays = [_spread(table, table.beside[name], widths, fill) for table in tables]
        found.fills[name], found.beside[name] = fill, mx.concatenate(arrays)
    return found


def _none_like(table: Table, lines: int) -> Table:
    """Lines without rows, kept as those of a table."""

    def none(array: mx.array) -> mx.array:
        return mx.zeros((lines, array.shape[1], 0, *array.shape[3:]), array.dtype)

    return table.each(none, [0] * lines)


def _spread(table: Table, array: mx.array, widths: Sequence[int], fill: float) -> mx.array:
    """An array of all slots of a table, in segments of other widths."""
    parts, start = [], 0
    for one, width in zip(table.segments, widths, strict=True):
        parts.append(padded(array[:, :, start : start + min(one.width, width)], width, fill))
        start += one.width
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]


def _chosen(column: Column, index: mx.array, width: int) -> Column:
    return column.each(lambda part: part[index][:, :, :width])


def _stacked(columns: Sequence[Column], width: int) -> Column:
    parts = [[padded(part[:, :, :width], width, 0) for part in one.parts] for one in columns]
    return columns[0].like(tuple(mx.concatenate(list(same)) for same in zip(*parts, strict=True)))
