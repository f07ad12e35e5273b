"""The rows of a table as arrays, or in parts as operations take them."""

from collections.abc import Sequence

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.segments import AttentionRows
from .column import Column, Parts
from .frame import as_they_came
from .step import Step, per_sequence
from .table import Table, behind


def packed_rows(table: Table) -> list[AttentionRows]:
    return [one.as_rows() for one in table.segments[:-1] if one.width]


def shared_rows(table: Table, framed: bool) -> list[AttentionRows]:
    """The shared rows, if any: in stored form if ``framed``, else as they arrived."""
    if table.prefix is None:
        return []
    if table.frame is None or framed:
        return [table.prefix.as_rows(shared=True)]
    keys, values = _shared(table, "keys"), _shared(table, "values")
    return [AttentionRows(keys, values, {}, shared=True)]


def _shared(table: Table, side: str) -> mx.array:
    """The shared "keys" or "values", as they arrived."""
    frame = table.frame and table.frame.each(lambda centre: centre[:1])  # the same in all
    column: Column = getattr(table.prefix, side)
    return as_they_came(frame, column.decode(column.view(table.prefix_rows)), side)


def behind_shared(
    table: Table, keys: mx.array, values: mx.array, mask: mx.array | str | None
) -> tuple[mx.array, mx.array, mx.array | str | None]:
    """Shared rows and then own ones as arrays [B, H, rows + N, ...], meant for one attention call
    only, and the mask of the own rows extended to all."""
    pairs = zip(("keys", "values"), (keys, values), strict=True)
    both = [behind(_shared(table, side).astype(own.dtype), own) for side, own in pairs]
    if isinstance(mask, mx.array):
        mask = mx.broadcast_to(mask, (*mask.shape[:-1], keys.shape[2]))
        fill = mx.array(mask.dtype == mx.bool_).astype(mask.dtype)
        seen = mx.broadcast_to(fill, (*mask.shape[:-1], table.prefix_rows))
        mask = mx.concatenate([seen, mask], axis=-1)
    return both[0], both[1], mask


def unpacked(
    table: Table, views: tuple[Parts, Parts], step: Step, came: Sequence[mx.array] = ()
) -> tuple[mx.array, mx.array]:
    """Keys and values as arrays: ``views`` of the tail, with the rows that ``came`` in this step as
    they were before they were packed. Evaluating the keys evaluates ``views`` too."""
    tail, apart, found = table.tail, table.tail.ragged or bool(step.spans), []
    before = [rows - count for rows, count in zip(tail.rows, step.counts, strict=True)]
    for side, parts, new in zip(("keys", "values"), views, came or (None, None), strict=True):
        if len(table.segments) > 1:  # the newest rows are dense anyway
            rows = true_rows(table, side, parts[0])
        elif new is not None and not apart and not before[0]:  # the start of a prompt
            rows = new
        else:
            kept = parts if new is None or apart else [part[:, :, : before[0]] for part in parts]
            rows = as_they_came(table.frame, getattr(tail, side).decode(kept), side)
            if new is not None and apart:
                slots = per_sequence((*before,)) + step.places
                (rows,) = resolve().put_each([rows], slots, [new])
            elif new is not None:
                rows = mx.concatenate([rows, new], axis=2)
        found.append(rows)
    keys, values = found
    return mx.depends(keys, [part for parts in views for part in parts]), values


def true_rows(table: Table, side: str, newest: mx.array | None = None) -> mx.array:
    """The "keys" or "values" in use as an array [B, H, N, D], as they arrived; ``newest`` as in
    ``in_parts``, for mixed precision."""
    if len(table.segments) > 1:
        rows = resolve().segment_rows(*in_parts(table, side, newest))[0]
    else:
        column: Column = getattr(table.tail, side)
        rows = column.decode(column.view(table.width))
    return as_they_came(table.frame, rows, side)


def in_parts(
    table: Table, side: str, newest: mx.array | None = None
) -> tuple[list[mx.array], mx.array, list[int], int]:
    """The arguments of ``segment_rows`` for mixed precision: the parts of the packed segments, the
    ``newest`` rows (None: those of the tail), the bits of each segment and the group size."""
    keys, packed, tail = side == "keys", packed_rows(table), table.tail
    parts = [part for rows in packed for part in (rows.keys if keys else rows.values)]
    bits = [rows.settings["bits" if keys else "v_bits"] for rows in packed]
    if newest is None:
        (newest,) = (tail.keys if keys else tail.values).view(tail.width)
    return parts, newest, bits, table.segments[0].keys.group_size or 0
