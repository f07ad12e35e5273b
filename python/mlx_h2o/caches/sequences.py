"""Select sequences of a table, and join sequences of several tables."""

from collections.abc import Sequence

import mlx.core as mx

from ..operations.composed.buffers import padded
from .column import Change
from .frame import Frame
from .table import FILLS, Table


def select(table: Table, sequences: Sequence[int]) -> Table:
    """A copy of some sequences in arrays of their own, without slots that none of them uses."""
    index = mx.array(list(sequences))
    rows = [[one.rows[n] for n in sequences] for one in table.segments]
    return _stacked([table], rows, [table.tokens[n] for n in sequences], lambda array: array[index])


def join(tables: Sequence[Table]) -> Table:
    """One table with the sequences of all ``tables``, in order, in arrays of its own."""
    tokens = [seen for table in tables for seen in table.tokens]
    like = next((table for table in tables if table.segments), None)
    if like is None:
        return Table([], tokens)
    found = [one if one.segments else _none_like(like, one.tokens) for one in tables if one.tokens]
    if len(found) == 1:
        return found[0].copy()
    same = zip(*(table.segments for table in found), strict=True)
    rows = [[count for one in parts for count in one.rows] for parts in same]
    return _stacked(found, rows, tokens, lambda array: array)


def _stacked(
    tables: Sequence[Table], rows: Sequence[list[int]], tokens: list[int], change: Change
) -> Table:
    """One table with the sequences that ``change`` makes of ``tables``, in order: ``rows`` of each
    sequence in each segment, without spare slots."""
    widths, segments = [max(one) for one in rows], []
    for place, (count, width) in enumerate(zip(rows, widths, strict=True)):
        same = [table.segments[place] for table in tables]
        parts = [
            mx.concatenate([padded(change(part)[:, :, :width], width, 0) for part in parts])
            for parts in zip(*(one.parts for one in same), strict=True)
        ]
        segments.append(same[0].like(parts, count))

    def spread(table: Table, array: mx.array, name: str) -> mx.array:
        """An array beside the rows of a table, with each segment brought to its new width."""
        parts, start, array = [], 0, change(array)
        for one, width in zip(table.segments, widths, strict=True):
            some = array[:, :, start : start + min(one.width, width)]
            parts.append(padded(some, width, FILLS[name]))
            start += one.width
        return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]

    found = Table(segments, tokens, None, tables[0].prefix)
    frames = [table.frame.each(change) for table in tables if table.frame is not None]
    found.frame = Frame.joined(frames) if frames else None
    found.unscored = any(table.unscored for table in tables)
    every = [(table, table.beside_all, mx.zeros((*table.shape, 0))) for table in tables]
    for name in dict.fromkeys(name for _, beside, _ in every for name in beside):
        arrays = [spread(table, beside.get(name, none), name) for table, beside, none in every]
        found.beside[name] = mx.concatenate(arrays)
    return found


def _none_like(table: Table, tokens: list[int]) -> Table:
    """Sequences without rows, in the formats of ``table``."""
    index, rows = mx.zeros(len(tokens), mx.int32), [[0] * len(tokens) for _ in table.segments]
    return _stacked([table], rows, tokens, lambda array: array[index])
