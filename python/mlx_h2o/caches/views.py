"""The rows of a table as arrays, or in parts as operations take them."""

from __future__ import annotations

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.segments import AttentionRows
from .column import Column
from .frame import as_they_came
from .table import Table, behind


def packed_rows(table: Table) -> list[AttentionRows]:
    """The packed segments."""
    return [one.as_rows() for one in table.segments[:-1] if one.width]


def shared_rows(table: Table, framed: bool) -> list[AttentionRows]:
    """The rows that others have too, if any: in their frame, or as they came."""
    if table.prefix is None:
        return []
    if table.frame is None or framed:
        return [table.prefix.as_rows(shared=True)]
    keys, values = _shared(table, "keys"), _shared(table, "values")
    return [AttentionRows(keys, values, {}, shared=True)]


def _shared(table: Table, side: str) -> mx.array:
    """Shared "keys", or "values", as they came."""
    column: Column = getattr(table.prefix, side)
    frame = table.frame and table.frame.each(lambda centre: centre[:1])  # the same in all
    return as_they_came(frame, column.decode(column.view(table.prefix_rows)), side)


def behind_shared(
    table: Table, keys: mx.array, values: mx.array, mask: mx.array | str | None
) -> tuple[mx.array, mx.array, mx.array | str | None]:
    """Shared rows and then own ones as arrays [B, H, rows + N, ...], which live no longer than the
    attention of a chunk needs them, and the mask of the own ones for all."""
    pairs = zip(("keys", "values"), (keys, values), strict=True)
    both = [behind(_shared(table, side).astype(own.dtype), own) for side, own in pairs]
    if isinstance(mask, mx.array):
        mask = mx.broadcast_to(mask, (*mask.shape[:-1], keys.shape[2]))
        fill = mx.array(mask.dtype == mx.bool_).astype(mask.dtype)
        seen = mx.broadcast_to(fill, (*mask.shape[:-1], table.prefix_rows))
        mask = mx.concatenate([seen, mask], axis=-1)
    return both[0], both[1], mask


def framed(table: Table, side: str, newest: mx.array | None = None) -> mx.array:
    """The "keys", or the "values", in use as an array [B, H, N, D], relative to their frame."""
    if len(table.segments) > 1:
        return resolve().segment_rows(*in_parts(table, side, newest))[0]
    column: Column = getattr(table.tail, side)
    return column.decode(column.view(table.width))


def true_rows(table: Table, side: str) -> mx.array:
    """The same as they came."""
    return as_they_came(table.frame, framed(table, side), side)


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
