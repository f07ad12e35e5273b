"""The slow reference of rows that merge, in float64, as docs/policies.md says of ``merge``.

It is written from the definition: pairs of rows, one after the other. A choice between two mergers
that cost nearly the same may fall otherwise in float32: ``merge`` says whether it met one.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

import reference

SHARPNESS = 3.0
NEAR = 1e-5
"""Two costs are nearly the same below this share of what they are differences of."""


def for_good(config) -> int:
    """The first positions, which stay as they are: sinks, or a prefix that they begin."""
    return max(config.sink_size, config.prefix_size)


def stages(config, rows: int, protected: int, count: int) -> list[int]:
    """How many rows go one after the other: of those that may, a quarter at a time."""
    found = []
    while count:
        free = rows - for_good(config) - protected
        found.append(min(count, max(1, free // 4)))
        rows, count = rows - found[-1], count - found[-1]
    return found


def merge(config, heads: list[list[Any]], count: int, recent_start: int, store) -> bool:
    """``count`` rows of each head become part of others, in place; whether a choice was close.

    Args:
        config: settings.
        heads: rows in the order of their slots, as ``reference_cache.Row``.
        count: rows that go of each head.
        recent_start: positions from here on are protected.
        store: what a column makes of a head's key and value.
    """
    targets, close = mergers(config, heads, count, recent_start, store)
    for rows, into in zip(heads, targets, strict=True):
        _close_gaps(rows, [*into])
    return close


def mergers(
    config, heads: list[list[Any]], count: int, recent_start: int, store
) -> tuple[list[dict[int, int]], bool]:
    """The same, but rows that go stay where they are: of each head, slot by slot, the slot that
    stays and where a row went, its own where it has no partner; and whether a choice was close."""
    costs, errors = zip(*(_costs(config, rows, recent_start) for rows in heads), strict=True)
    if config.shared_heads:
        costs, errors = ([np.mean(one, axis=0)] * len(heads) for one in (costs, errors))
    targets, close = [], False
    for head, (rows, cost, error) in enumerate(zip(heads, costs, errors, strict=True)):
        going, partner = _choice(config, rows, cost, count, recent_start)
        close |= _is_close(going, partner, cost, error)
        targets.append(_targets(going, partner))
        _join(rows, targets[-1], functools.partial(store, head))
    return targets, close


def _mass(rows: list[Any]) -> np.ndarray:
    directions = [row.key / max(np.linalg.norm(row.key), 1e-12) for row in rows]
    counts = [1 if row.leaves else row.count for row in rows]
    pairs = zip(counts, directions, strict=True)
    mean = np.mean([math.sqrt(count) * direction for count, direction in pairs], axis=0)
    mean = mean / max(np.linalg.norm(mean), 1e-12)
    cosines = [float(direction @ mean) for direction in directions]
    return np.array([n * math.exp(-SHARPNESS * c) for n, c in zip(counts, cosines, strict=True)])


def _costs(config, rows: list[Any], recent_start: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each pair, at [earlier slot, later slot], the cost and how far float32 may be off."""
    mass = _mass(rows)
    key = math.sqrt(np.mean([np.sum(np.square(row.key)) for row in rows])) / len(rows[0].key)
    value = 1 / math.sqrt(np.mean([np.sum(np.square(row.value)) for row in rows]))
    places = [np.concatenate([row.key * key, row.value * value]) for row in rows]
    free = [for_good(config) <= r.position < recent_start and not r.leaves for r in rows]
    cost = np.full((len(rows), len(rows)), np.inf)
    error = np.zeros(cost.shape)
    for i in range(len(rows)):
        for j in range(i + 1, len(rows)):
            if free[i] and free[j]:
                weight = math.sqrt(mass[i] * mass[j] / (mass[i] + mass[j]))
                cost[i, j] = weight * np.sum(np.square(places[i] - places[j]))
                error[i, j] = NEAR * weight * (places[i] @ places[i] + places[j] @ places[j])
    return cost, error


def _choice(config, rows, cost, count: int, recent_start: int) -> tuple[list[int], dict[int, int]]:
    """The slots that go, and where each slot would merge into; those that cannot are left out."""
    order = reference.retention_order(
        np.where([row.leaves for row in rows], np.nan, cost.min(axis=1)),
        [row.position for row in rows],
        sink_size=for_good(config),
        recent_start=recent_start,
    )
    partner = {i: int(cost[i].argmin()) for i in range(len(rows)) if cost[i].min() < np.inf}
    return sorted(order[len(rows) - count :]), partner


def _is_close(going, partner, cost, error) -> bool:
    """Whether another partner, or another row to go, costs hardly more."""
    chosen = {i: (cost[i, j], error[i, j]) for i, j in partner.items()}
    for i in going:
        if i not in partner:
            continue
        best, off = chosen[i]
        others = [j for j in range(len(cost)) if j != partner[i] and cost[i, j] < np.inf]
        if any(cost[i, j] - error[i, j] <= best + off for j in others):
            return True
        staying = [chosen[j] for j in partner if j not in going]
        if any(other - wrong <= best + off for other, wrong in staying):
            return True
    return False


def _targets(going: list[int], partner: dict[int, int]) -> dict[int, int]:
    """Of each row that goes the one that its partners lead to."""
    found = {}
    for slot in going:
        end = slot
        while end in going and end in partner:
            end = partner[end]
        found[slot] = end
    return found


def _join(rows: list[Any], targets: dict[int, int], store) -> None:
    """Each row that goes into its target, if that one stays."""
    members: dict[int, list[int]] = {}
    for slot, end in targets.items():
        if end not in targets:
            members.setdefault(end, []).append(slot)
    mass = _mass(rows)
    for end, slots in members.items():
        group = [end, *slots]
        weights = mass[group] / mass[group].sum()
        row = rows[end]
        row.key, row.value = store(
            sum(w * rows[i].key for w, i in zip(weights, group, strict=True)),
            sum(w * rows[i].value for w, i in zip(weights, group, strict=True)),
        )
        row.count = sum(rows[i].count for i in group)
        row.position = min(rows[i].position for i in group)
        row.fresh = 1 + max(rows[i].fresh for i in group)


def _close_gaps(rows: list[Any], going: list[int]) -> None:
    """The last rows fill the slots that fall free, the last one the first."""
    kept = len(rows) - len(going)
    moving = [slot for slot in range(kept, len(rows)) if slot not in going]
    free = [slot for slot in going if slot < kept]
    for slot in free:
        rows[slot] = rows[moving.pop()]
    del rows[kept:]
