"""The rows of a table as arrays, or in parts as operations take them."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.segments import AttentionRows
from .column import Parts, Segment
from .step import Step
from .table import Table, behind


def packed_rows(table: Table) -> list[AttentionRows]:
    return [one.as_rows() for one in table.segments[:-1] if one.width]


def shared_rows(table: Table, framed: bool) -> list[AttentionRows]:
    """The shared rows, if any: in stored form if ``framed``, else as they arrived."""
    if table.prefix is None:
        return []
    if table.frame is None or framed:
        return [table.prefix.as_rows(shared=True)]
    return [AttentionRows(*_shared(table), {}, shared=True)]


def _shared(table: Table) -> tuple[mx.array, mx.array]:
    """The shared keys and values, as they arrived."""
    frame = table.frame and table.frame.each(lambda centre: centre[:1])  # the same in all
    shared = Table([cast(Segment, table.prefix)], [table.prefix_rows], frame)
    return true_rows(shared, "keys"), true_rows(shared, "values")


def behind_shared(
    table: Table, keys: mx.array, values: mx.array, mask: mx.array | str | None
) -> tuple[mx.array, mx.array, mx.array | str | None]:
    """Shared rows and then own ones as arrays [B, H, rows + N, ...], meant for one attention call
    only, and the mask of the own rows extended to all."""
    pairs = zip(_shared(table), (keys, values), strict=True)
    both = [behind(shared.astype(own.dtype), own) for shared, own in pairs]
    if isinstance(mask, mx.array):
        mask = mx.broadcast_to(mask, (*mask.shape[:-1], keys.shape[2]))
        pads = [(0, 0)] * (mask.ndim - 1) + [(table.prefix_rows, 0)]
        mask = mx.pad(mask, pads, constant_values=mask.dtype == mx.bool_)  # all are seen
    return both[0], both[1], mask


def unpacked(
    table: Table, views: tuple[Parts, Parts], step: Step, came: Sequence[mx.array] = ()
) -> tuple[mx.array, mx.array]:
    """Keys and values as arrays: ``views`` of the tail, with the rows that ``came`` in this step as
    they were before they were packed. Evaluating the keys evaluates ``views`` too."""
    tail, found = table.tail, []
    before = [rows - count for rows, count in zip(tail.rows, step.counts, strict=True)]
    for side, parts, new in zip(("keys", "values"), views, came or (None, None), strict=True):
        if new is None or len(table.segments) > 1:  # then the newest rows are dense anyway
            rows = true_rows(table, side, parts)
        elif tail.ragged or step.spans:
            stored = true_rows(table, side, parts)
            (rows,) = resolve().put_each([stored], step.slots(before), [new])
        elif before[0]:
            older = true_rows(table, side, tuple(part[:, :, : before[0]] for part in parts))
            rows = mx.concatenate([older, new], axis=2)
        else:  # the start of a prompt
            rows = new
        found.append(rows)
    keys, values = found
    return mx.depends(keys, [*views[0], *views[1]]), values


def true_rows(table: Table, side: str, newest: Parts = ()) -> mx.array:
    """The "keys" or "values" in use as an array [B, H, N, D], as they arrived; ``newest`` are the
    stored rows of the tail, if not those in use."""
    newest = newest or table.tail.stored(side)
    if len(table.segments) > 1:
        rows = resolve().segment_rows(*in_parts(table, side, newest))[0]
    else:
        rows = getattr(table.tail, side).decode(newest)
    return rows if table.frame is None else table.frame.back(rows, side == "values")


def in_parts(
    table: Table, side: str, newest: Parts
) -> tuple[list[mx.array], mx.array, list[int], int]:
    """The arguments of ``segment_rows`` for mixed precision: the parts of the packed segments, the
    ``newest`` rows, the bits of each segment and the group size."""
    keys, packed = side == "keys", packed_rows(table)
    parts = [part for rows in packed for part in (rows.keys if keys else rows.values)]
    bits = [rows.settings["bits" if keys else "v_bits"] for rows in packed]
    return parts, newest[0], bits, table.segments[0].keys.group_size or 0
