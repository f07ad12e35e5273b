"""tova: keep the rows that the last query attends to most (Oren et al. 2024, TOVA)."""

from typing import Any

import mlx.core as mx

from .base import ByScores


class Tova(ByScores):
    """Ranks rows by their weight from the last query, averaged over its query heads.

    The paper averages over all heads of the layer and protects no rows, as
    ``sink_size=0, recent_size=0`` does.
    """

    name = "tova"
    needs_positions = False
    needs_weights = True
    chunk_queries = 1

    def accumulate(self, importance: mx.array, scores: mx.array, **_: Any) -> mx.array:
        return mx.mean(scores.reshape(*importance.shape[:2], -1, scores.shape[3]), axis=2)
