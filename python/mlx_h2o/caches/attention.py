"""The rows of a table as attention takes them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.segments import Rows
from .column import Column
from .table import Table

__all__ = ["DECODE_QUERIES", "dense", "in_parts", "segments_of", "settings_of"]

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
    packed = table.memo.get("attention")
    if packed is None:
        packed = [
            Rows(one.keys.view(one.width), one.values.view(one.width),
                 settings_of(one.keys, one.values, sparse_v))
            for one in table.segments[:-1]
            if one.width
        ]  # fmt: skip
        table.memo["attention"] = packed
    count, tail = width - table.packed_width, table.tail
    if not count:
        return list(packed)
    return [*packed, Rows(tail.keys.view(count)[0], tail.values.view(count)[0], {})]


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
    if side not in table.memo:
        columns = [getattr(one, side) for one in table.segments[:-1]]
        pairs = zip(table.segments, columns, strict=False)
        parts = [part for one, column in pairs for part in column.view(one.width)]
        bits = [column.bits for column in columns]
        table.memo[side] = parts, bits, columns[0].group_size
    parts, bits, group_size = table.memo[side]
    count = (table.width if width is None else width) - table.packed_width
    return parts, getattr(table.tail, side).view(count)[0], bits, group_size
