"""Scores of a long chunk, one number per key, without a matrix of all queries by all keys.

Attention over a chunk runs on MLX's own fused kernel, which keeps its logits to itself. What a
cache needs to know of them is computed here a second time, in blocks. The definition is of plain
MLX operations; a back end may bring ``prefill_scores(request)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import mlx.core as mx

from mlx_h2o.operations import arguments, composed, ema, validate
from mlx_h2o.operations.backends import operation_of
from mlx_h2o.operations.cache_requests import PrefillRequest
from mlx_h2o.operations.placement import placed
from mlx_h2o.operations.validate import AttentionRequest, StreamLike, dtype_name

__all__ = ["KINDS", "composed_scores", "last_scores", "prefill_scores", "request"]

OP = "prefill_scores"
KINDS = ("ema", "mass")

BLOCK_BYTES = 1 << 21
"""The logits of one block, in float32, take at most this much, or one row or column of them."""


def prefill_scores(
    q: mx.array,
    k: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
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
        576: no logit is stored, and "mass" makes each product twice.

    Raises:
        ValueError: shapes, dtypes, a mask, sinks or settings other than these.
        TypeError: an argument of another type altogether.
    """
    made = request(
        q,
        k,
        scale=scale,
        mask=mask,
        sinks=sinks,
        kind=kind,
        importance=importance,
        decay=decay,
        queries=queries,
        stream=stream,
    )
    served = operation_of(OP, made.stream)
    result: mx.array = (served or composed_scores)(made)
    return result


def request(
    q: mx.array,
    k: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    kind: Literal["ema", "mass"] = "ema",
    importance: mx.array | None = None,
    decay: float = 0.95,
    queries: int = ema.MAX_QUERIES,
    stream: StreamLike = None,
) -> PrefillRequest:
    """Check the arguments of ``prefill_scores``."""
    attention = _request(q, k, scale, mask, sinks, stream)
    if kind not in KINDS:
        raise ValueError(f"[{OP}] kind is {kind!r}, expected 'ema' or 'mass'.")
    decay = arguments.number(OP, "decay", decay)
    if not 0 <= decay < 1:
        raise ValueError(f"[{OP}] decay is {decay}, expected at least 0 and below 1.")
    queries = arguments.integer(OP, "queries", queries)
    if queries < 1:
        raise ValueError(f"[{OP}] queries is {queries}, expected at least 1.")
    if importance is not None:
        _check_importance(arguments.array(OP, "importance", importance), kind, k.shape[:3])
    if kind == "ema":
        attention = _last_queries(attention, queries)
    return PrefillRequest(attention, kind, importance, decay)


def composed_scores(request: PrefillRequest) -> mx.array:
    """The definition: logits in blocks, never all of them."""
    with placed(request.stream):
        if request.kind == "mass":
            return _mass(request.attention)
        return _moving_average(request.attention, request.importance, request.decay)


def last_scores(
    q: mx.array,
    k: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    queries: int = ema.MAX_QUERIES,
) -> mx.array:
    """The scores of the last ``queries`` queries themselves, float32 [B, Hq, queries or Lq, N].

    For policies that want more than a number per key. ``mask`` is for all Lq queries.
    """
    return composed.logits(_last_queries(_request(q, k, scale, mask, None, None), queries))


def _request(
    q: mx.array,
    k: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    stream: StreamLike,
) -> AttentionRequest:
    """The rules of attention hold, whose values are of no account here."""
    q, k = arguments.array(OP, "q", q), arguments.array(OP, "k", k)
    _check_dtypes(q.dtype, k.dtype)
    return validate.attention_request(
        q, k, k, scale=scale, mask=mask, sinks=sinks, stream=stream, op=OP
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


def _causal(request: AttentionRequest, first: int, last: int, start: int, stop: int) -> mx.array:
    """Whether the queries ``first`` to ``last`` see the keys ``start`` to ``stop``, 1 more each."""
    newest = request.keys.shape[2] - request.queries.shape[2]
    return mx.arange(start, stop) <= mx.arange(newest + first, newest + last)[:, None]


def _block(
    request: AttentionRequest, rows: tuple[int, int], columns: tuple[int, int], after: mx.array
) -> mx.array:
    """Logits [B, Hq, rows, columns], computed after ``after``.

    Without an order MLX may begin many blocks before it ends the first.
    """
    (first, last), (start, stop) = rows, columns
    mask = request.mask
    if request.causal:
        shape = (*request.queries.shape[:2], last - first, stop - start)
        mask = mx.broadcast_to(_causal(request, first, last, start, stop), shape)
    elif mask is not None:
        mask = mask[:, :, first:last, start:stop]
    return composed.logits(
        replace(
            request,
            queries=mx.depends(request.queries[:, :, first:last], [after]),
            keys=request.keys[:, :, start:stop],
            causal=False,
            mask=mask,
        )
    )


def _ranges(count: int, bytes_of_one: int) -> Iterator[tuple[int, int]]:
    size = max(1, BLOCK_BYTES // bytes_of_one)
    for start in range(0, count, size):
        yield start, min(start + size, count)


def _moving_average(
    request: AttentionRequest, importance: mx.array | None, decay: float
) -> mx.array:
    batch, heads, length, _ = request.queries.shape
    kv_heads, keys = request.keys.shape[1:3]
    masked = request.causal or request.mask is not None
    if importance is None:
        importance = mx.full((batch, kv_heads, keys), mx.nan)
    parts = [importance[:, :, :0]]
    for start, stop in _ranges(keys, batch * heads * length * 4):
        scores = _block(request, (0, length), (start, stop), parts[-1])
        before = importance[:, :, start:stop]
        parts.append(ema.accumulate(before, scores, decay=decay, masked=masked))
    return mx.concatenate(parts[1:], axis=2)


def _mass(request: AttentionRequest) -> mx.array:
    batch, heads, length, _ = request.queries.shape
    kv_heads, keys = request.keys.shape[1:3]
    # Once, not for every block.
    request = replace(request, keys=request.keys.astype(mx.float32))
    mass = mx.zeros((batch, kv_heads, keys))
    for first, last in _ranges(length, batch * heads * keys * 4):
        scores = _block(request, (first, last), (0, keys), mass)
        weights, total, _ = composed.softmax_parts(scores, request.sinks)
        shares = mx.where(total == 0, 0.0, 1 / total).reshape(batch, kv_heads, 1, -1)
        mass = mass + (shares @ weights.reshape(batch, kv_heads, -1, keys)).squeeze(2)
    return mass
