"""How results say what repeated timings gave."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["spread"]


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """The least, the median and the greatest, rounded."""
    found = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}
