"""Evicted rows are folded into rows that stay: NumPy, float64, one head at a time.

Written from docs/design.md; shares no code with the package.
"""

import math
from typing import Any

import numpy as np

SHARE = 0.5
"""The share of rows evicted together that is folded: the nearest ones."""

LEAST = 1e-9
"""Lower bound of a weight in a mean."""


def for_good(config) -> int:
    """How many first positions never change: the sinks, or the prefix if it is longer."""
    return max(config.budget.sink_size, config.prefix_size)


def features(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Vectors [N, D + Dv] that are near if attention can hardly tell the rows apart."""
    of_keys = np.sqrt(np.square(keys).sum(axis=1).mean()) / keys.shape[1]
    of_values = np.sqrt(np.square(values).sum(axis=1).mean())
    with np.errstate(invalid="ignore"):  # infinite rows give NaN
        return np.concatenate([keys * of_keys, values / max(of_values, 1e-6)], axis=1)


def targets(
    keys: np.ndarray, values: np.ndarray, weights: np.ndarray, eligible: np.ndarray,
    kept: list[int], share: float,
) -> tuple[dict[int, int], bool]:  # fmt: skip
    """For each evicted slot, the slot that it is folded into, or its own if there is none; and
    whether another one is as near as float32 can tell."""
    vectors, found, close = features(keys, values), {}, False
    stay = [slot for slot in kept if eligible[slot] and np.isfinite(vectors[slot]).all()]
    least: dict[int, float] = {}
    errors: dict[int, float] = {}
    for slot in sorted(set(range(len(keys))) - set(kept)):
        found[slot] = slot
        if not stay or np.isnan(weights[slot]):
            continue
        apart = np.square(vectors[stay] - vectors[slot]).sum(axis=1)
        nearest = int(apart.argmin())
        found[slot] = stay[nearest]
        off = 2e-6 * (np.square(vectors[stay]).sum(axis=1).max() + np.square(vectors[slot]).sum())
        close |= bool((np.delete(apart, nearest) <= apart[nearest] + off).any())
        least[slot], errors[slot] = apart[nearest], off
    order = sorted(least, key=lambda slot: (least[slot], slot))
    most = math.ceil(share * (len(keys) - len(kept)))
    if most < len(order):
        last, first = order[most - 1], order[most]
        close |= bool(least[first] <= least[last] + errors[last] + errors[first])
    found |= {slot: slot for slot in order[most:]}
    return found, close


def folded(array: np.ndarray, weights: np.ndarray, into: dict[int, int], slot: int) -> np.ndarray:
    """The weighted mean of the row at ``slot`` of ``array`` [N, ...] and of all rows folded into
    it."""
    group = [slot, *(one for one, other in into.items() if other == slot != one)]
    shares = np.maximum(np.nan_to_num(weights[group]), LEAST)
    return shares @ array[group] / shares.sum()


def fold(rows: list[Any], ranks: np.ndarray, kept: list[int], config, recent_start: int, store):
    """The rows at ``kept``, with the evicted ones folded in; and whether a choice was close.

    ``store(key, value)`` returns a row in the form that the cache stores.
    """
    keys, values = np.array([row.key for row in rows]), np.array([row.value for row in rows])
    eligible = [
        for_good(config) <= row.position < recent_start and rank <= 1
        for row, rank in zip(rows, ranks, strict=True)
    ]
    into, close = targets(keys, values, ranks, np.array(eligible), kept, SHARE)
    for slot in sorted(set(into.values()) & set(kept)):
        row = rows[slot]
        others = [rows[one] for one, other in into.items() if other == slot]
        row.key, row.value = store(
            folded(keys, ranks, into, slot), folded(values, ranks, into, slot)
        )
        row.count += sum(other.count for other in others)
        row.score += sum(other.score for other in others)
        row.fresh = 1 + max(one.fresh for one in (row, *others))
    return close
