"""snapkv: keep the rows that the last queries of the prompt attend to (Li et al. 2024, SnapKV)."""

from typing import Any, ClassVar

import mlx.core as mx

from ..operations.backends import resolve
from .base import ByScores
from .weights import greatest_near


class SnapKV(ByScores):
    """Ranks rows by the weights of an observation window of 32 queries, pooled over 7 positions.

    A chunk of 32 queries or more resets ``C``: the mean weight of a row over the last 32 queries,
    and then the maximum over the rows within 3 places of it, by position, so that neighbours stay
    together. The paper evicts once, after the prompt. Here rows are also evicted during
    decoding, so the window moves: ``C = 31/32 C + 1/32 w`` for each further query, where the
    first weight of a row sets ``C``.
    """

    name = "snapkv"
    needs_weights = True
    window: ClassVar[int] = 32
    neighbours: ClassVar[int] = 3
    chunk_queries = window

    def accumulate(
        self, importance: mx.array, scores: mx.array, *, positions: mx.array | None = None, **_: Any
    ) -> mx.array:
        if scores.shape[2] < self.window:
            decay = 1 - 1 / self.window
            return resolve().accumulate_scores(importance, scores, decay=decay, masked=False)
        votes = scores.reshape(*importance.shape[:2], -1, scores.shape[3])
        return greatest_near(mx.mean(votes, axis=2), positions, -self.neighbours, self.neighbours)
