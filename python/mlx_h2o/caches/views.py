"""The rows of a table as arrays, or in parts as operations take them."""

from __future__ import annotations

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.segments import Rows
from .column import Column, packing_of
from .frame import as_they_came
from .table import Table


def packed_rows(table: Table) -> list[Rows]:
    """The packed segments."""
    if table.packed is None:
        table.packed = [
            Rows(one.keys.view(one.width), one.values.view(one.width),
                 packing_of(one.keys, one.values, 0.0))
            for one in table.segments[:-1]
            if one.width
        ]  # fmt: skip
    return table.packed


def dense(table: Table, side: str, newest: mx.array | None = None) -> mx.array:
    """The "keys", or the "values", in use as an array [B, H, N, D], relative to their frame."""
    if len(table.segments) > 1:
        return resolve().segment_rows(*in_parts(table, side, newest))[0]
    column: Column = getattr(table.tail, side)
    return column.decode(column.view(table.width))


def true_rows(table: Table, side: str) -> mx.array:
    """The same as they came."""
    return as_they_came(table.frame, dense(table, side), side)


def in_parts(
    table: Table, side: str, newest: mx.array | None = None
) -> tuple[list[mx.array], mx.array, list[int], int]:
    """The same of mixed precision as ``segment_rows`` takes them: the parts of the packed
    segments, the ``newest`` rows, None: those in use of the tail, and how rows are packed."""
    keys, packed, tail = side == "keys", packed_rows(table), table.tail
    parts = [part for rows in packed for part in (rows.keys if keys else rows.values)]
    bits = [rows.settings["bits" if keys else "v_bits"] for rows in packed]
    if newest is None:
        (newest,) = (tail.keys if keys else tail.values).view(tail.width)
    return parts, newest, bits, table.segments[0].keys.group_size or 0
