"""The last queries of a long chunk."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlx_h2o.operations import composed
from mlx_h2o.operations.composed import ema
from mlx_h2o.operations.requests import AttentionRequest, attention_request

KINDS = ("ema", "mass")


def last_scores(
    q: mx.array,
    k: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    row_bias: mx.array | None = None,
    queries: int = ema.MAX_QUERIES,
) -> mx.array:
    """The scores of the last ``queries`` queries themselves, float32 [B, Hq, queries or Lq, N].

    For policies that want more than a number per key. ``mask`` is for all Lq queries.
    """
    request = attention_request(
        q, k, k, scale=scale, mask=mask, row_bias=row_bias, op="prefill_scores"
    )
    return composed.logits(last_queries(request, queries))


def last_queries(request: AttentionRequest, count: int) -> AttentionRequest:
    """The request of the last ``count`` queries; a bottom-right causal mask fits as it is."""
    mask = None if request.mask is None else request.mask[:, :, -count:]
    return replace(request, queries=request.queries[:, :, -count:], mask=mask)
