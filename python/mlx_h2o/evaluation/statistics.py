"""Timings in turns and their spreads; paired differences and their bootstrap intervals."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000

_K = TypeVar("_K")
_T = TypeVar("_T")


def in_turns(arms: Mapping[_K, Callable[[], _T]], rounds: int) -> dict[_K, list[_T]]:
    """The results of each arm in each round. Each round begins with the next arm, so that other
    load on the machine affects all of them alike."""
    names = list(arms)
    found: dict[_K, list[_T]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found[name].append(arms[name]())
        names = names[1:] + names[:1]
    return found


def spread(values: npt.ArrayLike, digits: int = 4) -> dict[str, float]:
    """The least, the median and the greatest, rounded."""
    found = np.quantile(np.asarray(values, dtype=np.float64), [0, 0.5, 1]).tolist()
    return dict(zip(("min", "median", "max"), (round(one, digits) for one in found), strict=True))


def ratios(ones: npt.ArrayLike, others: npt.ArrayLike, digits: int = 4) -> dict[str, float]:
    """The spread of the first figures divided by the others, round by round."""
    return spread(np.divide(ones, others), digits)


@dataclass(frozen=True)
class Difference:
    """The mean of a paired difference, and its 95 % interval, which is NaN for a single pair."""

    mean: float
    low: float
    high: float


def paired(ours: npt.ArrayLike, others: npt.ArrayLike) -> Difference:
    """`ours` minus `others`: the mean, and its percentile bootstrap interval.

    The pairs (texts or questions) are drawn with replacement, 10,000 times with a fixed seed.

    Raises ValueError unless both have the same number of figures, at least one.
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
