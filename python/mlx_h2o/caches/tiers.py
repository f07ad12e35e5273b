"""Mixed precision: the newest rows are dense, older ones packed with more bits or fewer.

The segments of such a table are the heavy rows, the low-precision (light) rows, if any, and a tail
of dense rows. Rows change segments in groups, at evictions or when the tail is full.
"""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.composed.buffers import gathered, padded
from .column import Column, Segment
from .eviction import Eviction
from .step import per_sequence
from .table import Table, join, select
from .views import in_parts


def pack_older(table: Table, evictions: Sequence[Eviction]) -> Table:
    """The table after these evictions, with older rows of the sequences that are due packed."""
    first, count = evictions[0], len(table.tokens)
    all_due, config = sum(len(one.due) for one in evictions) == count, first.config
    if all_due and config.max_kv_size is None and not table.tail.ragged:
        return more_packed(table, min(table.tail.width, config.dense_rows + config.reach))
    if len(first.due) == count and not any(one.ragged for one in table.segments):
        return _arranged(first)
    tables = [select(table, [n]) for n in range(count)]
    for one in evictions:
        for n in one.due:
            alone = replace(one, table=tables[n], due=[0], ends=[one.ends[n]])
            tables[n] = _arranged(alone)
    return join(tables)


def more_packed(table: Table, newest: int) -> Table:
    """The table with all but the ``newest`` rows packed; without light rows, and with tails of the
    same length. O(rows that are packed), as long as there is room for them."""
    first, tail = table.segments
    count, width, start = tail.width - newest, first.width, per_sequence((*first.rows,))
    if count == 0:
        return table
    packed = first.each(lambda part: part, [held + count for held in first.rows])
    packed.reserve(width + count, 2**31)
    (keys,), (values,) = tail.view(count)
    rows = [*packed.keys.encode(keys), *packed.values.encode(values)]
    packed.parts = resolve().put_each(packed.parts, start + mx.arange(count)[:, None], rows)
    slots, start = mx.arange(packed.width), start.squeeze(3)
    came = mx.where(slots < start + count, slots - start + width, start)  # or an unused slot
    newer = mx.arange(width + count, table.width) + 0 * start
    order = mx.concatenate([mx.where(slots < start, slots, came), newer], axis=2)
    order = mx.broadcast_to(order, (*table.shape, order.shape[2]))
    segments = [packed, _cut(tail, newest)]
    return table.arranged(segments, lambda array, _: gathered(array, order))


def _cut(tail: Segment, newest: int) -> Segment:
    """The ``newest`` rows of a tail, with room for as many as before."""
    start, most, rows = tail.width - newest, tail.capacity, [newest] * len(tail.rows)
    return tail.each(lambda part: padded(part[:, :, start : start + newest], most, 0), rows)


def truncated(table: Table, gone: Sequence[int]) -> Table:
    """The table without the newest ``gone`` tokens of each sequence, none of them evicted."""
    tables = []
    for n, count in enumerate(gone):
        alone = table if len(gone) == 1 else select(table, [n])
        rows = alone.lengths[0] - count
        slots = mx.sort(mx.argsort(alone.positions, axis=2)[:, :, :rows], axis=2).astype(mx.uint32)
        none = slots[:, :, :0]  # no row loses precision
        tables.append(_rearranged(alone, [slots, none, none][: len(table.segments)]))
        tables[-1].tokens = [alone.tokens[0] - count]
    return join(tables)


def _arranged(eviction: Eviction) -> Table:
    """The table after an eviction from all of its sequences, which have equally many rows."""
    table, keep, config = eviction.table, eviction.stay, eviction.config
    newest, tail = table.tail.rows[0], eviction.tail
    slots = mx.arange(table.width, dtype=mx.uint32)
    slots = mx.broadcast_to(slots, (*table.shape, table.width))
    ranks = None if config.light_bits is None else replace(eviction, tail=0).ranks()
    if keep < table.width:
        own = eviction.ranks() if tail or ranks is None else ranks
        kept = eviction.behind_skipped(eviction.kept(own))
        slots = mx.concatenate([kept, slots[:, :, table.width - tail :]], axis=2)
        newest = min(newest, eviction.protected)  # only rows that are sure to stay keep their place
    newest = min(keep, newest, config.dense_rows + config.reach)
    packed = [slots[:, :, : keep - newest]]
    if ranks is not None:
        packed = _split(eviction, packed[0], ranks, newest)
    return _rearranged(table, [*packed, slots[:, :, keep - newest :]])


def _rearranged(table: Table, slots: Sequence[mx.array]) -> Table:
    """The table with the rows at these slots in each segment: ascending in packed ones, and of the
    tail the newest, which stay there.

    O(rows). A row that gets fewer bits keeps the upper bits of its codes.
    """
    *packed, newest = slots
    pairs = zip(table.segments[:-1], packed, strict=True)
    segments = [_gathered(table, segment, own) for segment, own in pairs]
    segments.append(_cut(table.tail, newest.shape[2]))
    order = mx.concatenate([*slots], axis=2)
    return table.arranged(segments, lambda array, _: gathered(array, order))


def _gathered(table: Table, segment: Segment, slots: mx.array) -> Segment:
    """A packed segment of the rows at ``slots``."""
    count, found = slots.shape[2], []
    if not count:
        return segment.each(lambda part: part[:, :, :0], [0] * len(table.tokens))
    for side in ("keys", "values"):
        column: Column = getattr(segment, side)
        newest = table.tail.stored(side)
        if column.bits in (2, 4, 8):
            found += resolve().segment_rows(*in_parts(table, side, newest), slots, column.bits)
        else:  # no other segment has these bits: codes stay
            both = zip(segment.stored(side), column.encode(newest[0]), strict=True)
            found += [gathered(mx.concatenate([*parts], axis=2), slots) for parts in both]
    return segment.like(found, [count] * len(table.tokens))


def _split(eviction: Eviction, slots: mx.array, ranks: mx.array, newest: int) -> list[mx.array]:
    """The heavy and the light rows among ``slots``, each ascending.

    Rows of lower rank become light, half of all, and first those that already are, since more bits
    would not improve them. As published, without dense rows, those of the recent range are light.
    """
    table, count = eviction.table, slots.shape[2]
    light = count // 2
    if published := eviction.config.dense_rows == 0:
        light = min(count, max(0, eviction.protected - newest))
        ranks = -table.positions.astype(mx.float32)
    ranks = gathered(ranks, slots)
    ranks = mx.where(mx.isnan(ranks), -mx.inf, ranks)
    place = mx.argsort(mx.argsort(-ranks, axis=2), axis=2)
    if not published:
        was_light = (slots >= table.segments[0].width) & (slots < table.packed_width)
        place = place + mx.where(was_light, count, 0)
    order = gathered(slots, mx.argsort(place, axis=2))
    heavy = count - light
    return [mx.sort(order[:, :, :heavy], axis=2), mx.sort(order[:, :, heavy:], axis=2)]
