"""window: sinks and the newest rows (Xiao et al. 2024, StreamingLLM), mlx_lm's RotatingKVCache."""

from __future__ import annotations

import mlx.core as mx

from ..operations.composed_cache import ages
from .base import Policy, Rows


class Window(Policy):
    """The newest rows stay, whatever the split of heavy and recent rows."""

    name = "window"

    def rank(self, rows: Rows) -> mx.array:
        return ages(rows.positions, rows.offset)
