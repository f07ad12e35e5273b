"""value-aware: rank by attention mass times value norm (Guo et al. 2024, VATP)."""

import mlx.core as mx

from .base import Rows
from .h2o_sum import H2OSum


class ValueAware(H2OSum):
    """Ranks rows by attention mass times the L1 norm of their value.

    A row contributes weight times value to the output: one with much attention and a value near
    zero, like the first token in many models, adds little. Reads all values once per eviction.
    """

    name = "value-aware"

    def rank(self, rows: Rows) -> mx.array:
        return rows.importance * mx.sum(mx.abs(rows.values.astype(mx.float32)), axis=-1)
