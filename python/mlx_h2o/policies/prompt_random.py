"""prompt-random: the prompt stays as far as the budget goes, and of the answer a random sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .base import Rows
from .random import Random

if TYPE_CHECKING:
    from ..config import H2OConfig

_POSITIONS = 2**24  # which float32 holds exactly


class PromptRandom(Random):
    """Rows of a prompt rank above all others, the earlier the higher; the others as by "random".

    The control for policies whose gain is that they keep the prompt. Rows that came together are a
    prompt's: what a row accumulates is 1 then, and 0 where it came alone. So do the rows of drafts,
    with which it refuses to work.
    """

    name = "prompt-random"
    needs_scores = True
    needs_positions = False
    chunk_queries = 1

    @classmethod
    def from_config(cls, config: H2OConfig) -> PromptRandom:
        if config.speculative:
            raise ValueError(
                f"[H2OConfig] policy is 'prompt-random' and speculative {config.speculative}, "
                "expected 0: rows of a draft come together, as those of a prompt do."
            )
        return cls(config.random_seed)

    def accumulate(self, importance: mx.array, scores: mx.array, **_: Any) -> mx.array:
        new = mx.isnan(importance)
        together = mx.sum(new, axis=2, keepdims=True) > 1
        return mx.where(new, together.astype(mx.float32), importance)

    def rank(self, rows: Rows) -> mx.array:
        early = mx.maximum(_POSITIONS - rows.positions, 1).astype(mx.float32)
        return mx.where(rows.importance == 1, early, super().rank(rows))
