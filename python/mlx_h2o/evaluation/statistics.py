"""Paired differences and their bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RESAMPLES", "Difference", "paired"]

RESAMPLES = 10_000


@dataclass(frozen=True)
class Difference:
    """The mean of a paired difference, and its 95 % interval; NaN where there is one document."""

    mean: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def paired(ours: npt.ArrayLike | Sequence[float], others: npt.ArrayLike) -> Difference:
    """`ours` minus `others`: the mean, and the percentile bootstrap interval of it.

    Documents are drawn with replacement, 10,000 times with a fixed seed; where each has figures of
    several seeds, those of each document that was drawn are drawn with replacement too.

    Args:
        ours: [documents] or [documents, seeds].
        others: as many figures of the same documents and seeds.

    Raises ValueError unless both have the same shape, of at least one figure.
    """
    one, other = np.asarray(ours, dtype=np.float64), np.asarray(others, dtype=np.float64)
    if one.shape != other.shape or one.ndim not in (1, 2) or not one.size:
        raise ValueError(
            f"[paired] shapes are {one.shape} and {other.shape}, expected twice the same, of "
            "documents, or of documents and seeds."
        )
    differences = one - other
    documents = len(differences)
    if documents == 1 and differences.ndim == 2:
        return Difference(float(differences.mean()), float("nan"), float("nan"))
    chance = np.random.default_rng(0)
    drawn = differences[chance.integers(0, documents, (RESAMPLES, documents))]
    if differences.ndim == 2 and np.ptp(differences, axis=1).any():
        drawn = np.take_along_axis(drawn, chance.integers(0, drawn.shape[2], drawn.shape), axis=2)
    means = drawn.reshape(RESAMPLES, -1).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(float(differences.mean()), float(low), float(high))
