"""What several policies make of attention weights. Not a policy itself."""

from __future__ import annotations

import mlx.core as mx

from ..operations import composed


def per_kv_head(weights: mx.array, heads: int) -> mx.array:
    """Weights [B, Hq, L, N] as [B, H, Hq / H, L, N]: the query heads of each KV head."""
    batch, query_heads, length, rows = weights.shape
    return weights.reshape(batch, heads, query_heads // heads, length, rows)


def order(values: mx.array, positions: mx.array) -> mx.array:
    """The place of each row among its head's, 0 (least) to N - 1, float32 [B, H, N].

    Of equal values the lower position is the greater, whatever the slots: as in evictions.
    O(N log N) per head.
    """
    key = composed.retention_key(values, positions)
    places = mx.broadcast_to(mx.arange(values.shape[2], dtype=mx.float32), values.shape)
    return mx.put_along_axis(mx.zeros(values.shape), mx.argsort(key, axis=2), places, axis=2)
