"""value-aware: attention mass times the length of the value (Guo et al. 2024, VATP)."""

from __future__ import annotations

import mlx.core as mx

from .base import Rows
from .h2o_sum import H2OSum


class ValueAware(H2OSum):
    """A row's rank is its attention mass times the L1 norm of its value.

    What a row adds to an output is weight times value: a row with much attention and a value near
    zero, as the first token of many models, adds little. Reads all values once per eviction.
    """

    name = "value-aware"

    def rank(self, rows: Rows) -> mx.array:
        return rows.importance * mx.sum(mx.abs(rows.values.astype(mx.float32)), axis=-1)
