"""The rows of a table as attention takes them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.segments import Rows
from .column import Column
from .table import Table

DECODE_QUERIES = 8
"""Up to here the kernels return output and scores together, and read packed rows as they are."""


def settings_of(keys: Column, values: Column, sparse_v: float = 0.0) -> dict[str, Any]:
    """What operations must be told of packed rows; nothing of arrays."""
    if keys.bits is None:
        return {}
    found: dict[str, Any] = {
        "bits": keys.bits, "v_bits": values.bits or keys.bits, "group_size": keys.group_size
    }  # fmt: skip
    return found | ({"sparse_v_threshold": sparse_v} if sparse_v else {})


def segments_of(table: Table, width: int, sparse_v: float = 0.0) -> list[Rows]:
    """The first ``width`` slots in parts, in order."""
    packed = _packed(table)
    if sparse_v:
        more = {"sparse_v_threshold": sparse_v}
        packed = [rows._replace(settings=rows.settings | more) for rows in packed]
    count, tail = width - table.packed_width, table.tail
    if not count:
        return [*packed]
    return [*packed, Rows(tail.keys.view(count)[0], tail.values.view(count)[0], {})]


def _packed(table: Table) -> list[Rows]:
    """The packed segments."""
    if table.packed is None:
        table.packed = [
            Rows(one.keys.view(one.width), one.values.view(one.width),
                 settings_of(one.keys, one.values))
            for one in table.segments[:-1]
            if one.width
        ]  # fmt: skip
    return table.packed


def dense(table: Table, side: str, width: int | None = None) -> mx.array:
    """The "keys", or the "values", in use as an array [B, H, width, D]."""
    if len(table.segments) > 1:
        return resolve().segment_rows(*in_parts(table, side, width))[0]
    column: Column = getattr(table.tail, side)
    return column.decode(column.view(table.width if width is None else width))


def in_parts(
    table: Table, side: str, width: int | None = None
) -> tuple[list[mx.array], mx.array, list[int], int]:
    """The same of mixed precision as ``segment_rows`` takes them: the parts of the packed
    segments, the newest rows, and how rows are packed."""
    keys, packed, tail = side == "keys", _packed(table), table.tail
    parts = [part for rows in packed for part in (rows.keys if keys else rows.values)]
    bits = [rows.settings["bits" if keys else "v_bits"] for rows in packed]
    count = (table.width if width is None else width) - table.packed_width
    newest = (tail.keys if keys else tail.values).view(count)[0]
    return parts, newest, bits, table.segments[0].keys.group_size or 0
