"""The rows of a table as attention takes them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.segments import Rows
from .column import Column
from .frame import Frame
from .table import Table

DECODE_QUERIES = 8
"""Up to here the kernels return output and scores together, and read packed rows as they are."""


def settings_of(keys: Column, values: Column, sparse_v: float) -> dict[str, Any]:
    """What operations must be told of packed rows; nothing of arrays."""
    if keys.bits is None and values.bits is None:
        return {}
    bits = keys.bits or values.bits
    found: dict[str, Any] = {"bits": bits, "v_bits": values.bits or bits}
    found["group_size"] = keys.group_size or values.group_size or 64
    return found | {"sparse_v_threshold": sparse_v} if sparse_v else found


def segments_of(table: Table, newest: tuple[mx.array, mx.array], sparse_v: float) -> list[Rows]:
    """The rows in parts, in order, of which the ``newest`` keys and values are the last."""
    packed = _packed(table)
    if sparse_v:
        more = {"sparse_v_threshold": sparse_v}
        packed = [rows._replace(settings=rows.settings | more) for rows in packed]
    return [*packed, Rows(*newest, {})] if newest[0].shape[2] else [*packed]


def _packed(table: Table) -> list[Rows]:
    """The packed segments."""
    if table.packed is None:
        table.packed = [
            Rows(one.keys.view(one.width), one.values.view(one.width),
                 settings_of(one.keys, one.values, 0.0))
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


def as_they_came(frame: Frame | None, rows: mx.array, side: str) -> mx.array:
    """Kept "keys", or "values", outside of their frame."""
    return rows if frame is None else frame.back(rows, int(side == "values"))


def in_parts(
    table: Table, side: str, newest: mx.array | None = None
) -> tuple[list[mx.array], mx.array, list[int], int]:
    """The same of mixed precision as ``segment_rows`` takes them: the parts of the packed
    segments, the ``newest`` rows, None: those in use of the tail, and how rows are packed."""
    keys, packed, tail = side == "keys", _packed(table), table.tail
    parts = [part for rows in packed for part in (rows.keys if keys else rows.values)]
    bits = [rows.settings["bits" if keys else "v_bits"] for rows in packed]
    if newest is None:
        (newest,) = (tail.keys if keys else tail.values).view(tail.width)
    return parts, newest, bits, table.segments[0].keys.group_size or 0
