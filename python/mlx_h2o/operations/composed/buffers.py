"""Reading, writing and moving rows in the slots of arrays [B, H, N] or [B, H, N, width].

Only ``append_rows`` changes an array that was passed; all other results are new objects.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import mlx.core as mx

from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.requests import Parts

LAST = mx.array(2**32 - 1, mx.uint32)
"""Greater than any slot."""

Encode = Callable[[mx.array, int, int], Parts]
"""Makes codes from rows, bits and a seed, like ``turbo.encode_rows``."""


def gathered(array: mx.array, slots: mx.array) -> mx.array:
    """The rows at ``slots`` [B, H, n]."""
    return mx.take_along_axis(array, wide(slots, array), axis=2)


def put_rows(buffer: mx.array, slots: mx.array, rows: mx.array) -> mx.array:
    """``buffer`` with ``rows`` at ``slots`` [B, H, n], in place if nothing else holds it."""
    return mx.put_along_axis(buffer, wide(slots, buffer), rows, axis=2)


def put_each(buffers: list[mx.array], slots: mx.array, rows: list[mx.array]) -> list[mx.array]:
    """``put_rows`` for several buffers: rows [B, H, n, width] at ``slots`` [B, 1, n, 1]."""
    pairs = zip(buffers, rows, strict=True)
    return [mx.put_along_axis(buffer, slots, new, axis=2) for buffer, new in pairs]


def append_rows(buffers: list[mx.array], rows: list[mx.array], start: int) -> list[mx.array]:
    """Write new rows [B, H, L, width] from slot ``start`` on. Returns the buffers, written in place
    if nothing else holds them, and then the first ``start + L`` slots of each.
    """
    end = start + rows[0].shape[2]
    for buffer, new in zip(buffers, rows, strict=True):
        buffer[:, :, start:end] = new
    return [*buffers, *first_slots(buffers, end)]


def first_slots(buffers: Sequence[mx.array], count: int) -> list[mx.array]:
    """The first ``count`` slots of each buffer; always other arrays."""
    return [mx.split(buffer, [count], 2)[0] for buffer in buffers]  # slices take longer


def quantize_append(
    keys: Parts,
    values: Parts,
    new_keys: mx.array,
    new_values: mx.array,
    slots: mx.array,
    *,
    bits: int,
    group_size: int,
    v_bits: int,
    encode: Encode = turbo.encode_rows,
) -> list[mx.array]:
    """Pack the new rows, with ``encode`` if they become codes, and scatter each part into its slots
    by MLX's own operation. Returns the arrays of the keys, then of the values."""
    new = [
        *packed(new_keys, len(keys), bits, group_size, turbo.KEYS, encode),
        *packed(new_values, len(values), v_bits, group_size, turbo.VALUES, encode),
    ]
    slots = mx.minimum(slots, mx.array(keys[0].shape[2] - 1, mx.uint32))
    pairs = zip((*keys, *values), new, strict=True)
    first, *others = (put_rows(stored, slots, part) for stored, part in pairs)
    # Tied together, since the graph of an array that nobody reads would grow.
    return [mx.depends(first, others), *others]


def packed(
    rows: mx.array,
    parts: int,
    bits: int,
    group_size: int,
    seed: int,
    encode: Encode = turbo.encode_rows,
) -> Sequence[mx.array]:
    """Rows in as many ``parts`` as they are stored in; ``encode`` makes the codes."""
    if parts == 1:
        return [rows]
    if parts == 2:
        return encode(rows, bits, seed)
    return mx.quantize(rows, group_size=group_size, bits=bits)


def padded(array: mx.array, length: int, fill: float) -> mx.array:
    """The array extended by ``fill`` to at least ``length`` slots; always another array."""
    missing = length - array.shape[2]
    if missing <= 0:
        return mx.contiguous(array)
    shape = (*array.shape[:2], missing, *array.shape[3:])
    return mx.concatenate([array, mx.full(shape, fill, array.dtype)], axis=2)


def wide(slots: mx.array, array: mx.array) -> mx.array:
    """``slots`` with as many axes as ``array``, as indices of its rows."""
    return slots if slots.ndim == array.ndim else mx.expand_dims(slots, 3)


def compact_rows(
    buffers: Sequence[mx.array],
    kept: mx.array,
    sequences: Sequence[int],
    start: int = 0,
    tail: int = 0,
) -> list[mx.array]:
    """The buffers with the rows that stay in their first slots; later slots are undefined.

    Rows that stay fill the gaps of evicted rows: the order of slots does not matter to attention,
    since keys already contain RoPE, so no more rows move than there are gaps.

    Args:
        buffers: [B, H, C] or [B, H, C, width].
        kept: uint32 [b, H, K], ascending: the rows that stay of these ``sequences``. Those
            beyond slot K move to the free slots below it, the last row to the first free slot.
        sequences: which sequences, all different.
        start: slot of the first of ``tail`` rows to put after those that stay.
        tail: how many rows.
    """
    source, target = _moves(kept, buffers[0].shape[2], start, tail)
    if len(sequences) < buffers[0].shape[0]:
        stay = mx.broadcast_to(_slots(source.shape[2]), (1, *source.shape[1:]))
        places = {n: place for place, n in enumerate(sequences)}
        order = mx.array([places.get(n, len(sequences)) for n in range(buffers[0].shape[0])])
        source, target = (mx.concatenate([one, stay])[order] for one in (source, target))
    sides = {3: (source, target), 4: (mx.expand_dims(source, 3), mx.expand_dims(target, 3))}
    moves = ((each, *sides[each.ndim]) for each in buffers)
    return [put_rows(each, go, gathered(each, come)) for each, come, go in moves]


def _moves(kept: mx.array, capacity: int, start: int, tail: int) -> tuple[mx.array, mx.array]:
    """The source and the target slots of moves; a row whose slots are equal stays in place."""
    keep = kept.shape[2]
    count = min(keep, capacity - keep)
    source = kept[:, :, -1 : -count - 1 : -1]
    free = mx.sort(marked(kept, capacity), axis=2)[:, :, :count]
    target = mx.where(source >= keep, free, source)
    if tail:
        newest = mx.broadcast_to(mx.arange(tail, dtype=mx.uint32), (*kept.shape[:2], tail))
        source = mx.concatenate([source, newest + start], axis=2)
        target = mx.concatenate([target, newest + keep], axis=2)
    return source, target


def marked(kept: mx.array, capacity: int) -> mx.array:
    """uint32 [B, H, capacity]: the number of each slot, or ``LAST`` where it is ``kept``."""
    slots = mx.broadcast_to(_slots(capacity), (*kept.shape[:2], capacity))
    return mx.put_along_axis(slots, kept, LAST, axis=2)


@lru_cache(maxsize=64)
def _slots(capacity: int) -> mx.array:
    """uint32 [capacity]: the number of each slot, evaluated, so that any thread can read it."""
    return mx.array(list(range(capacity)), mx.uint32)
