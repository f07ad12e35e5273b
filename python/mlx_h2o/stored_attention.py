"""Attention over the rows of a store, in whatever form they are kept."""

from __future__ import annotations

import mlx.core as mx

from . import fast
from .storage import Storage, Stored

__all__ = ["attention_with_scores"]


def attention_with_scores(
    store: Storage,
    queries: mx.array,
    keys: Stored,
    values: Stored,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Output, scores and lse, as ``fast.scaled_dot_product_attention_with_scores`` gives them.

    ``keys`` and ``values`` are what the store handed out: arrays, or packed rows, which the
    fused kernels read as they are.
    """
    if isinstance(keys, tuple):
        return fast.scaled_dot_product_attention_quantized_with_scores(
            queries,
            *keys,
            *values,
            scale=scale,
            mask=mask,
            sinks=sinks,
            return_lse=True,
            **store.attention_settings,
        )
    assert isinstance(values, mx.array)
    return fast.scaled_dot_product_attention_with_scores(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks, return_lse=True
    )
