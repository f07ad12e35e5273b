"""Rows that merged: whether a cache made what the slow reference made, which goes on with them.

A mean in float32 and in float64 differ in the last place, packed ones by a code. So that this does
not add up, the references take the cache's rows once they are compared. Where the reference says
that a choice was close, float32 may have made another: what holds of any choice is checked, and
the reference follows it.
"""

from __future__ import annotations

import numpy as np

from cache_columns import packings, step_of, stored_rows
from reference_cache import ReferenceCache, Row

MADE = 2e-5
"""Of a mean of float32 rows; 2e-6 was seen."""


def take_merged(cache, references: list[ReferenceCache]) -> int:
    """Compare, and let the references have the cache's rows; how many of them had a close choice.

    Raises AssertionError where a row is not what it has to be.
    """
    positions, counts = np.array(cache.positions), np.exp(np.array(cache.scores, np.float64))
    keys, values = stored_rows(cache)
    close = 0
    for b, reference in enumerate(references):
        for h, rows in enumerate(reference.heads):
            slots = np.argsort(positions[b, h])
            slots = slots[positions[b, h, slots] >= 0]
            where = f"sequence {b}, head {h}"
            there = positions[b, h, slots].tolist()
            if reference.close:
                _follow(rows, slots, there, counts[b, h, slots], where)
            assert there == [row.position for row in rows], where
            np.testing.assert_allclose(
                counts[b, h, slots], [row.count for row in rows], rtol=1e-4, err_msg=where
            )
            assert slots.tolist() == [row.slot for row in rows], f"slots of {where}"
            for slot, row in zip(slots, rows, strict=True):
                centres = [one if one is None else one[h] for one in reference.centres]
                both = keys[b, h, slot], values[b, h, slot]
                _take(cache.config, row, *both, centres, reference.close)
        close += reference.close
        reference.close = False
    return close


def _follow(rows: list[Row], slots, positions, counts, where: str) -> None:
    """The rows are as many and stand for as many as the reference's; from now on they are its."""
    assert len(positions) == len(rows), where
    assert sum(np.rint(counts)) == sum(row.count for row in rows), where
    for row, slot, position, count in zip(rows, slots, positions, counts, strict=True):
        row.slot, row.position, row.count = int(slot), position, int(np.rint(count))


def _take(config, row: Row, key: np.ndarray, value: np.ndarray, centres, followed: bool) -> None:
    pairs = zip((key, value), (row.key, row.value), packings(config), centres, strict=True)
    for found, expected, width, centre in pairs:
        if followed:
            continue
        if row.fresh:
            # Each of two packings is a step off at most.
            wrong = MADE if width is None else (1 + row.fresh) * step_of(expected, width, centre)
            np.testing.assert_allclose(found, expected, rtol=0, atol=wrong)
        elif not np.array_equal(found, expected):  # NumPy's check takes far longer
            np.testing.assert_array_equal(found, expected)
    row.key, row.value, row.fresh = key, value, 0
