"""What is known of the keys of several sequences, cut apart and put together as their rows are."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from ..operations.key_statistics import LEAST_NORM
from ..stores.storage import Storage
from .key_ranks import KeyRanks

__all__ = ["joined_ranks", "sliced_ranks"]


def sliced_ranks(
    known: KeyRanks, part: Storage, members: Sequence[int], start: int, stop: int
) -> KeyRanks:
    """Of ``part``: the slots from ``start`` up to ``stop`` of some sequences.

    What is cut off must be padding, whose keys are zeros, or rows that are not in the sum yet.
    """
    key_sum, inverse_norms = known.statistics
    if list(members) != list(range(key_sum.shape[0])):
        index = mx.array(list(members))
        key_sum, inverse_norms = key_sum[index], inverse_norms[index]
    inverse_norms = inverse_norms[:, :, start:stop]
    positions = weakref.ref(part.positions)
    return replace(known, statistics=(key_sum, inverse_norms), positions=positions)


def joined_ranks(
    parts: Sequence[tuple[Sequence[int], Storage]],
    ranks: Sequence[KeyRanks | None],
    store: Storage,
) -> KeyRanks | None:
    """Of ``store``, which holds all parts behind padding; nothing where it is not known of one."""
    known = [one for one in ranks if one is not None]
    appended = {part.length - one.length for one, (_, part) in zip(known, parts, strict=False)}
    if len(known) < len(parts) or len(appended) > 1:
        return None
    length = store.length - appended.pop()
    norms = mx.concatenate([_behind_padding(one.statistics[1], length) for one in known])
    key_sum = mx.concatenate([one.statistics[0] for one in known])
    places = [place for members, _ in parts for place in members]
    if places != sorted(places):
        order = mx.array(sorted(range(len(places)), key=places.__getitem__))
        key_sum, norms = key_sum[order], norms[order]
    return KeyRanks(
        (key_sum, norms),
        weakref.ref(store.positions),
        replaced=max(one.replaced for one in known),
    )


def _behind_padding(inverse_norms: mx.array, length: int) -> mx.array:
    missing = length - inverse_norms.shape[2]
    if missing == 0:
        return inverse_norms
    padding = mx.full((*inverse_norms.shape[:2], missing), 1 / LEAST_NORM, mx.float32)
    return mx.concatenate([padding, inverse_norms], axis=2)
