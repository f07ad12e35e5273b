"""Folded rows: compare those of a cache with the slow reference, which then continues with them.

Means in float32 and float64 differ in the last place, or by a code if they are packed. The
references take over the cache's rows after each comparison, so that this does not accumulate. If
the reference reports a close choice, float32 may have chosen differently: then only properties of
any choice are checked, and the reference follows the cache.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np

import reference_folding
from cache_columns import packings, step_of, stored_rows
from mlx_h2o.policies.h2o import H2O
from reference_cache import ReferenceCache, Row

MADE = 2e-5
"""Largest error of a mean of float32 rows; 2e-6 was seen."""


@contextlib.contextmanager
def everything_folds() -> Iterator[None]:
    """Fold all evicted rows and not only the nearer half, so that no token is lost."""
    with (
        mock.patch.object(H2O, "fold_share", 1.0),
        mock.patch.object(reference_folding, "SHARE", 1.0),
    ):
        yield


def counts_of(cache) -> np.ndarray:
    """How many rows each row stands for, [B, H, N]."""
    if cache.row_bias is None:
        return np.ones(cache.positions.shape)
    return np.exp(np.array(cache.row_bias, np.float64))[:, :, : cache.positions.shape[2]]


def take_folded(cache, references: list[ReferenceCache]) -> int:
    """Compare, then let the references take the cache's rows; returns how many choices were close.

    Raises AssertionError if a row is wrong.
    """
    positions, counts = np.array(cache.positions), counts_of(cache)
    keys, values = stored_rows(cache)
    close = 0
    for b, reference in enumerate(references):
        for h, rows in enumerate(reference.heads):
            slots = np.argsort(positions[b, h])
            slots = slots[positions[b, h, slots] >= 0]
            where = f"sequence {b}, head {h}"
            assert positions[b, h, slots].tolist() == [row.position for row in rows], where
            found = counts[b, h, slots]
            if reference.close:
                assert np.rint(found).sum() <= reference.offset, where
                for row, count in zip(rows, found, strict=True):
                    row.count = int(np.rint(count))
            np.testing.assert_allclose(found, [row.count for row in rows], rtol=1e-4, err_msg=where)
            for slot, row in zip(slots, rows, strict=True):
                centres = [one if one is None else one[h] for one in reference.centres]
                both = keys[b, h, slot], values[b, h, slot]
                _take(cache.config, row, *both, centres, reference.close)
                if reference.close:
                    row.score = float(np.array(cache.scores[b, h, int(slot)]))
        close += reference.close
        reference.close = False
    return close


def _take(config, row: Row, key: np.ndarray, value: np.ndarray, centres, followed: bool) -> None:
    pairs = zip((key, value), (row.key, row.value), packings(config), centres, strict=True)
    for found, expected, width, centre in pairs:
        if followed:
            continue
        if row.fresh:
            # Each of two packings is off by a step at most.
            wrong = MADE if width is None else (1 + row.fresh) * step_of(expected, width, centre)
            np.testing.assert_allclose(found, expected, rtol=0, atol=wrong)
        elif not np.array_equal(found, expected):  # NumPy's check takes far longer
            np.testing.assert_array_equal(found, expected)
    row.key, row.value, row.fresh = key, value, 0
