"""The native replacement of a row in a cache of mixed precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_h2o.operations.tier_requests import TierRequest, TierRows

__all__ = ["replaced_in_tiers", "unpacked_tiers"]


def replaced_in_tiers(module: Any, request: TierRequest) -> TierRequest:
    """The rows after the replacement, in the memory of the inputs where that is free."""
    tiers, statistics = request.tiers, request.statistics
    results = module.replace_in_tiers(
        [part for tier in tiers for part in (*tier.keys, *tier.values)],
        request.keys,
        request.values,
        request.importance,
        request.positions,
        request.new_keys,
        request.new_values,
        position=request.position,
        sink_size=request.sink_size,
        recent_start=request.recent_start,
        ranks=request.ranks,
        statistics=[] if statistics is None else [*statistics],
        bits=[tier.bits for tier in tiers],
        value_bits=[tier.v_bits for tier in tiers],
        group_size=request.group_size,
        stream=request.stream,
    )
    end = 6 * len(tiers)
    keys, values, importance, positions, *kept = results[end:]
    changed = [
        tier._replace(keys=tuple(results[at : at + 3]), values=tuple(results[at + 3 : at + 6]))
        for at, tier in zip(range(0, end, 6), tiers, strict=True)
    ]
    return request._replace(
        tiers=tuple(changed),
        keys=keys,
        values=values,
        importance=importance,
        positions=positions,
        statistics=(kept[0], kept[1]) if kept else None,
    )


def unpacked_tiers(
    module: Any, tiers: Sequence[TierRows], keys: mx.array, values: mx.array, group_size: int
) -> tuple[mx.array, mx.array]:
    """Keys and values of the tiers and of the newest rows, one behind the other."""
    found = module.rows_as_arrays(
        [part for tier in tiers for part in (*tier.keys, *tier.values)],
        keys,
        values,
        bits=[tier.bits for tier in tiers],
        value_bits=[tier.v_bits for tier in tiers],
        group_size=group_size,
    )
    return found[0], found[1]
