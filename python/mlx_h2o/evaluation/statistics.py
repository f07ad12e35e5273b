"""Spreads of repeated timings; paired differences and their bootstrap intervals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RESAMPLES", "Difference", "paired", "spread"]

RESAMPLES = 10_000


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """The least, the median and the greatest, rounded."""
    found = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


@dataclass(frozen=True)
class Difference:
    """The mean of a paired difference, and its 95 % interval; NaN where there is one figure."""

    mean: float
    low: float
    high: float


def paired(ours: npt.ArrayLike | Sequence[float], others: npt.ArrayLike) -> Difference:
    """`ours` minus `others`: the mean, and the percentile bootstrap interval of it.

    The pairs, of texts or of questions, are drawn with replacement, 10,000 times with a fixed seed.

    Raises ValueError unless both are as many figures, at least one.
    """
    one, other = np.asarray(ours, dtype=np.float64), np.asarray(others, dtype=np.float64)
    if one.shape != other.shape or one.ndim != 1 or not one.size:
        raise ValueError(
            f"[paired] shapes are {one.shape} and {other.shape}, expected as many figures of each."
        )
    differences = one - other
    count = len(differences)
    if count == 1:
        return Difference(float(differences.mean()), float("nan"), float("nan"))
    drawn = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    low, high = np.quantile(differences[drawn].mean(axis=1), [0.025, 0.975])
    return Difference(float(differences.mean()), float(low), float(high))
