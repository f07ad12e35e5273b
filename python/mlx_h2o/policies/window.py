"""window: keep sinks and the newest rows (Xiao et al. 2024), like mlx_lm's RotatingKVCache."""

import mlx.core as mx

from ..operations.composed import beside_rows
from .base import Policy, Rows


class Window(Policy):
    """Keeps the newest rows (StreamingLLM), however rows are split into heavy and recent."""

    name = "window"

    def rank(self, rows: Rows) -> mx.array:
        # The age, because float32 cannot hold every position beyond 2^24.
        return (rows.positions - beside_rows(rows.offset)).astype(mx.float32)
