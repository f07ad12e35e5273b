"""Rows that stay fill the gaps of evicted rows: the definition, in plain MLX operations.

The order of slots does not matter to attention, since keys already contain RoPE, so no more rows
move than there are gaps.
"""

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from mlx_h2o.operations.composed.buffers import gathered, put_rows

LAST = mx.array(2**32 - 1, mx.uint32)
"""Greater than any slot."""


def compact_rows(
    buffers: Sequence[mx.array],
    kept: mx.array,
    sequences: Sequence[int],
    start: int = 0,
    tail: int = 0,
) -> list[mx.array]:
    """The buffers with the rows that stay in their first slots; later slots are undefined.

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
    return [put_rows(each, target, gathered(each, source)) for each in buffers]


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
