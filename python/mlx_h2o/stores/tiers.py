"""Which packed rows deserve more bits: the heavier half, by their ranks."""

from __future__ import annotations

import mlx.core as mx

__all__ = ["halves", "ordered"]


def ordered(ranks: mx.array) -> mx.array:
    """Ranks that compare: a row without one is the lightest."""
    return mx.where(mx.isnan(ranks), -mx.inf, ranks)


def halves(slots: mx.array, ranks: mx.array, light: slice) -> tuple[mx.array, mx.array]:
    """``slots`` [B, H, n] of rows, cut in two, each ascending; the first half takes an odd one.

    The heavier half by ``ranks`` [B, H, N] comes first. Rows that already are in ``light``, a range
    of slots, count as lighter than all others: they would gain nothing.
    """
    count = slots.shape[2]
    found = mx.take_along_axis(ranks, slots, axis=2)
    place = mx.argsort(mx.argsort(-found, axis=2), axis=2)
    was_light = mx.logical_and(slots >= light.start, slots < light.stop)
    place = place + mx.where(was_light, count, 0)
    order = mx.take_along_axis(slots, mx.argsort(place, axis=2), axis=2)
    heavy = (count + 1) // 2
    return mx.sort(order[:, :, :heavy], axis=2), mx.sort(order[:, :, heavy:], axis=2)
