"""One new row in a store of mixed precision: what goes, what is packed, and where."""

from __future__ import annotations

import mlx.core as mx

from .. import fast
from ..operations.backends import operation_of
from ..operations.tier_requests import TierRequest, TierRows
from .packed_rows import PackedRows
from .packing import Packing
from .tiers import ordered

__all__ = ["composed_replacement", "serve_tier_replacement"]


def serve_tier_replacement(request: TierRequest) -> TierRequest:
    """The rows after the new row has come, by the back end that brings this operation."""
    served = operation_of("replace_in_tiers", request.stream)
    result: TierRequest = (served or composed_replacement)(request)
    return result


def composed_replacement(request: TierRequest) -> TierRequest:
    """Of plain operations, which is its definition. It leaves the statistics as they are.

    The worst row goes, the oldest of the newest rows is packed and takes its slot, and the new row
    comes last. Where that slot is in the light tier and the packed row ranks above the lightest of
    the heavy tier, that one goes there, cut down to the upper bits of its codes, and the packed row
    takes its slot.
    """
    tiers = [_rows(tier, request.group_size) for tier in request.tiers]
    packed = sum(tier.length for tier in tiers)
    ranks = request.importance if request.ranks is None else request.ranks
    worst = fast.evict_indices(
        ranks,
        request.positions,
        count=1,
        sink_size=request.sink_size,
        recent_start=request.recent_start,
    )
    if len(tiers) == 1:
        changed, sources = _one_tier(request, tiers[0], worst), [(worst, _oldest(packed, worst))]
    else:
        changed, sources = _two_tiers(request, tiers, worst, ordered(ranks))
    importance, positions = (
        _moved(rows, sources, packed) for rows in (request.importance, request.positions)
    )
    place = mx.full((*positions.shape[:2], 1), request.position, mx.int32)
    importance = mx.concatenate([importance, mx.full(place.shape, mx.nan, mx.float32)], axis=2)
    positions = mx.concatenate([positions, place], axis=2)
    keys = mx.concatenate([request.keys[:, :, 1:], request.new_keys], axis=2)
    values = mx.concatenate([request.values[:, :, 1:], request.new_values], axis=2)
    # Whoever evaluates the keys evaluates the rest too: else the graph of every step would hang on
    # it.
    rest = [part for tier in changed for part in tier.arrays()]
    return request._replace(
        tiers=tuple(
            one._replace(keys=tier.keys, values=tier.values)
            for one, tier in zip(request.tiers, changed, strict=True)
        ),
        keys=mx.depends(keys, [*rest, values, importance, positions]),
        values=values,
        importance=importance,
        positions=positions,
    )


def _rows(tier: TierRows, group_size: int) -> PackedRows:
    return PackedRows(tier.keys, tier.values, Packing(tier.bits, tier.v_bits, group_size))


def _oldest(packed: int, like: mx.array) -> mx.array:
    return mx.full(like.shape, packed, mx.uint32)


def _one_tier(request: TierRequest, tier: PackedRows, worst: mx.array) -> list[PackedRows]:
    return [tier.written(worst, _leaving(request, tier.packing))]


def _leaving(request: TierRequest, packing: Packing) -> PackedRows:
    return PackedRows.of(request.keys[:, :, :1], request.values[:, :, :1], packing)


def _two_tiers(
    request: TierRequest, tiers: list[PackedRows], worst: mx.array, ranks: mx.array
) -> tuple[list[PackedRows], list[tuple[mx.array, mx.array]]]:
    """The tiers, and what is remembered of which row at which slot: (to, from), in order."""
    heavy, light = tiers
    packed = heavy.length + light.length
    sinking = mx.argmin(ranks[:, :, : heavy.length], axis=2, keepdims=True).astype(mx.uint32)
    in_heavy = worst < heavy.length
    above = ranks[:, :, packed : packed + 1] > mx.take_along_axis(ranks, sinking, axis=2)
    sinks = mx.logical_and(mx.logical_not(in_heavy), above)
    to_heavy = mx.logical_or(in_heavy, sinks)
    heavy_slot = mx.where(in_heavy, worst, sinking)
    light_slot = mx.where(in_heavy, mx.array(0, mx.uint32), worst - heavy.length)
    there = heavy.at(heavy_slot)
    new_light = there.as_packed(light.packing).chosen(sinks, _leaving(request, light.packing))
    new_light = light.at(light_slot).chosen(in_heavy, new_light)
    # Each tier is written at one slot of every head, where need be with what is there.
    changed = [
        heavy.written(heavy_slot, _leaving(request, heavy.packing).chosen(to_heavy, there)),
        light.written(light_slot, new_light),
    ]
    oldest = _oldest(packed, worst)
    return changed, [
        (worst, mx.where(sinks, sinking, worst)),
        (mx.where(to_heavy, heavy_slot, worst), oldest),
    ]


def _moved(rows: mx.array, sources: list[tuple[mx.array, mx.array]], packed: int) -> mx.array:
    """What is remembered of the rows, the oldest of the newest ones having gone."""
    for slot, source in sources:
        found = mx.take_along_axis(rows, source, axis=2)
        rows = mx.put_along_axis(rows, slot, found, axis=2)
    return mx.concatenate([rows[:, :, :packed], rows[:, :, packed + 1 :]], axis=2)
