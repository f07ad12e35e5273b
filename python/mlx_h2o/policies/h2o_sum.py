"""h2o-sum: keep the rows with the most attention so far (Zhang et al. 2023, H2O, sec. 4)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..operations.composed.accumulating import add_mass
from .base import ByScores


class H2OSum(ByScores):
    """``C`` is the attention mass of a row: its weights, summed over all queries since it came.

    Summed over the query heads of the KV head too. Nothing fades, so older rows have an advantage
    that the recent window must make up for.
    """

    name = "h2o-sum"
    needs_positions = False
    needs_weights = True
    chunk_queries = None
    kind = "mass"

    def accumulate(self, importance: mx.array, scores: mx.array, **_: Any) -> mx.array:
        return add_mass(importance, scores.reshape(*importance.shape[:2], -1, scores.shape[3]))
