"""Scores of a long chunk, one number per key, without a matrix of all queries by all keys.

Attention over a chunk runs on MLX's own fused kernel, which keeps its logits to itself. What a
cache needs to know of them is computed a second time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import mlx.core as mx

from mlx_h2o.operations import arguments, composed, validate
from mlx_h2o.operations.backends import serve
from mlx_h2o.operations.composed import ema
from mlx_h2o.operations.composed import prefill as composed_prefill
from mlx_h2o.operations.requests import AttentionRequest, PrefillRequest
from mlx_h2o.operations.validate import StreamLike, dtype_name

OP = "prefill_scores"
KINDS = ("ema", "mass")


def prefill_scores(
    q: mx.array,
    k: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    row_bias: mx.array | None = None,
    kind: Literal["ema", "mass"] = "ema",
    importance: mx.array | None = None,
    decay: float = 0.95,
    queries: int = ema.MAX_QUERIES,
    stream: StreamLike = None,
) -> mx.array:
    """What a chunk of queries says of each key, summed up per KV head.

    ``kind="ema"``: the moving average of AtomGradient 2026, section 3.2, over the last ``queries``
    queries in order: exactly what accumulating the scores of
    ``scaled_dot_product_attention_with_scores`` gives, in blocks of keys. Each query weighs less
    than the next by the factor ``decay``, so the older ones are left out.

    ``kind="mass"``: the attention mass of Zhang et al. 2023 (H2O), in blocks of queries: the sum
    over all queries, and over the query heads of the KV head, of the weights
    ``exp(scores - lse)``. A query that sees nothing adds nothing.

    Args:
        q: queries [B, Hq, Lq, D], float32, float16 or bfloat16.
        k: keys [B, Hkv, N, D], the dtype of the queries; Hq is a multiple of Hkv.
        scale: finite factor of the products.
        mask: as in ``scaled_dot_product_attention_with_scores``, for all Lq queries.
        sinks: learned logits [Hq] in the denominator of "mass"; scores, and so "ema", do not
            know of them.
        row_bias: float32 [B, Hkv, N], as in ``scaled_dot_product_attention_with_scores``.
        kind: "ema" or "mass".
        importance: for "ema", the average so far, float32 [B, Hkv, N], NaN where a row has not
            been scored; None: no row has been. "mass" starts at 0 and takes none.
        decay: for "ema", at least 0 and below 1.
        queries: for "ema", how many queries count, from the end of the chunk; at least 1.
        stream: stream or device to run on.

    Returns:
        float32 [B, Hkv, N]. For "ema" NaN where a row is still unscored. NaN in an additive mask
        counts as masked in "ema" and makes the mass of its KV head NaN.

        "ema" costs min(Lq, queries) * N products of q and k per query head, "mass" Lq * N: those
        of the attention itself, once more. The logits in memory at a time are a few blocks of
        2 MiB, or of one query by all keys ("mass") or of the counted queries by one key ("ema")
        where that is more. On GPU streams kernels serve head sizes that are multiples of 32 up to
        576, without ``row_bias``: no logit is stored, and "mass" makes each product twice.

    Raises:
        ValueError: shapes, dtypes, a mask, sinks or settings other than these.
        TypeError: an argument of another type altogether.
    """
    attention = _request(q, k, scale, mask, sinks, stream, row_bias)
    if kind not in KINDS:
        raise ValueError(f"[{OP}] kind is {kind!r}, expected 'ema' or 'mass'.")
    decay = arguments.decay(OP, decay)
    queries = arguments.integer(OP, "queries", queries)
    if queries < 1:
        raise ValueError(f"[{OP}] queries is {queries}, expected at least 1.")
    if importance is not None:
        _check_importance(arguments.array(OP, "importance", importance), kind, k.shape[:3])
    if kind == "ema":
        attention = _last_queries(attention, queries)
    request = PrefillRequest(attention, kind, importance, decay)
    return serve(composed_prefill.prefill_scores, request)


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
    request = _request(q, k, scale, mask, None, None, row_bias)
    return composed.logits(_last_queries(request, queries))


def _request(
    q: mx.array,
    k: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    stream: StreamLike,
    row_bias: mx.array | None = None,
) -> AttentionRequest:
    """The rules of attention hold, whose values are of no account here."""
    q, k = arguments.array(OP, "q", q), arguments.array(OP, "k", k)
    _check_dtypes(q.dtype, k.dtype)
    return validate.attention_request(
        q, k, k, scale=scale, mask=mask, sinks=sinks, row_bias=row_bias, stream=stream, op=OP
    )


def _check_dtypes(queries: mx.Dtype, keys: mx.Dtype) -> None:
    if queries != keys and {queries, keys} <= {*validate.FLOATS}:
        raise ValueError(
            f"[{OP}] queries and keys are {dtype_name(queries)} and {dtype_name(keys)}, "
            "expected the same dtype."
        )


def _check_importance(importance: mx.array, kind: str, shape: tuple[int, ...]) -> None:
    if kind != "ema":
        raise ValueError(f"[{OP}] importance is given with kind {kind!r}, expected it with 'ema'.")
    if importance.dtype != mx.float32:
        raise ValueError(f"[{OP}] importance is {dtype_name(importance.dtype)}, expected float32.")
    if importance.shape != shape:
        raise ValueError(
            f"[{OP}] importance has shape {importance.shape}, expected [B, Hkv, N] = {shape}."
        )


def _last_queries(request: AttentionRequest, count: int) -> AttentionRequest:
    """The request of the last ``count`` queries; a bottom-right causal mask fits as it is."""
    mask = None if request.mask is None else request.mask[:, :, -count:]
    return replace(request, queries=request.queries[:, :, -count:], mask=mask)
