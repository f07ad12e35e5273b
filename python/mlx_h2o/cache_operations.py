"""Operations on the rows of a cache: the moving average of scores, ranks, and replacement.

Re-exported by ``fast``. Each call is validated, then served by the best back end (``backends``).
"""

import mlx.core as mx

from mlx_h2o import cache_requests, composed_cache
from mlx_h2o.arguments import StreamLike
from mlx_h2o.backends import for_attention, for_retention, operation_of
from mlx_h2o.cache_requests import AccumulateRequest, RankName, ReplaceRequest

__all__ = ["accumulate_scores", "attention_and_accumulate", "key_diversity", "replace_worst"]


def accumulate_scores(
    importance: mx.array,
    scores: mx.array,
    *,
    decay: float,
    masked: bool = True,
    stream: StreamLike = None,
) -> mx.array:
    """The moving average ``C = a*C + (1-a)*|s|`` of every row, over the queries in order.

    ``s`` is the mean of a row's scores over the unmasked query heads of its KV head. A pair that
    is masked for every head of the group leaves C unchanged, and the first unmasked score of a
    row sets ``C = |s|`` (AtomGradient 2026, sec. 3.2, whose C starts at 0).

    Args:
        importance: C, float32 [B, H, N], NaN where a row has not been scored.
        scores: float32 [B, Hq, Lq, N], -inf (or NaN) where masked; Hq a multiple of H, Lq at
            most 128.
        decay: a, at least 0 and below 1.
        masked: False promises that every score is finite, which saves work on some back ends.
        stream: stream or device to run on.

    Returns:
        float32 [B, H, N]. With one query the arithmetic, and so every bit, is the same on all
        CPU back ends.

    Raises:
        ValueError: shapes, dtypes or a decay other than these.
        TypeError: an argument that is not an array or a number where one is expected.
    """
    request = cache_requests.accumulate_request(
        importance, scores, decay=decay, masked=masked, stream=stream
    )
    return _accumulate(request)


def _accumulate(request: AccumulateRequest) -> mx.array:
    served = operation_of("accumulate_scores", request.stream)
    result: mx.array = (served or composed_cache.accumulate_scores)(request)
    return result


def attention_and_accumulate(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    importance: mx.array,
    *,
    scale: float,
    decay: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    stream: StreamLike = None,
) -> tuple[mx.array, mx.array]:
    """Attention whose scores go into a moving average; a back end need not store them.

    ``scaled_dot_product_attention_with_scores`` followed by ``accumulate_scores``, with the
    arguments and errors of both; at most 128 queries. ``importance`` has the heads of the keys.

    Returns:
        ``(out, importance)``: [B, Hq, Lq, Dv] in the dtype of the queries, and float32
        [B, Hkv, N]. Evaluating ``out`` evaluates both.
    """
    request = cache_requests.attention_accumulate_request(
        q, k, v, importance, scale=scale, decay=decay, mask=mask, sinks=sinks, stream=stream
    )
    attention = request.attention
    backend = for_attention(attention)
    fused = getattr(backend, "attention_and_accumulate", None)
    if fused is not None:
        out, importance = fused(request)
        return out, importance
    out, scores, _ = backend.attention(attention)
    assert scores is not None
    masked = attention.mask is not None or (attention.causal and q.shape[2] > 1)
    following = AccumulateRequest(importance, scores, request.decay, masked, attention.stream)
    importance = _accumulate(following)
    # Untied, the scores of every step would wait for someone to ask, graph and all.
    out = mx.depends(out, [importance])
    return out, importance


def key_diversity(keys: mx.array, *, stream: StreamLike = None) -> mx.array:
    """Minus the cosine of each key with the mean of the normalised keys of its head.

    Args:
        keys: [B, H, N, D], float32, float16 or bfloat16.
        stream: stream or device to run on.

    Returns:
        float32 [B, H, N]; a key of zeros gets 0. Computed in float32.

    Raises:
        ValueError: another shape or dtype.
        TypeError: ``keys`` is not an array.
    """
    request = cache_requests.key_diversity_request(keys, stream=stream)
    served = operation_of("key_diversity", request.stream)
    result: mx.array = (served or composed_cache.key_diversity)(request)
    return result


def replace_worst(
    keys: mx.array,
    values: mx.array,
    importance: mx.array,
    positions: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    *,
    position: int,
    sink_size: int = 0,
    recent_start: int | None = None,
    ranks: mx.array | RankName | None = None,
    stream: StreamLike = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Steady-state eviction: in each head a new row takes the place of the worst one.

    The row is the one that ``evict_indices(ranks, positions, count=1)`` names. Its key and value
    become the new ones, its importance NaN (not yet scored), its position ``position``.

    Args:
        keys: [B, H, N, D], float32, float16 or bfloat16.
        values: [B, H, N, Dv], of one of these dtypes.
        importance: float32 [B, H, N].
        positions: int32 [B, H, N], distinct within a head; negative: padding.
        new_keys: [B, H, 1, D], the dtype of the keys.
        new_values: [B, H, 1, Dv], the dtype of the values.
        position: of the new row, 0 to 2**30 - 1.
        sink_size: the first positions, which are protected.
        recent_start: the first position of the protected recent window; None: no window.
        ranks: float32 [B, H, N], or the name of what they would be: "importance" (as None), "age"
            (the oldest row goes), "key_diversity" (the function of this name).
        stream: stream or device to run on.

    Returns:
        keys, values, importance and positions. Evaluating the keys evaluates all four. The arrays
        that were passed never change; where nothing else holds them, a back end may write into
        their memory, so that a row costs no copy of the others (native: always; composed: where
        MLX's own scatter does).

    Raises:
        ValueError: shapes, dtypes or numbers other than these.
        TypeError: an argument that is not an array or an integer where one is expected.
    """
    request = cache_requests.replace_request(
        keys,
        values,
        importance,
        positions,
        new_keys,
        new_values,
        position=position,
        sink_size=sink_size,
        recent_start=recent_start,
        ranks=ranks,
        stream=stream,
    )
    return serve_replacement(request)


def serve_replacement(
    request: ReplaceRequest,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """``replace_worst`` for arguments that are known to be right, such as a store's own."""
    served = operation_of("replace_worst", request.stream)
    if served is not None:
        result: tuple[mx.array, mx.array, mx.array, mx.array] = served(request)
        return result
    retention = composed_cache.retention_of(request)
    slots = for_retention("evict_indices", retention)(retention)
    return composed_cache.written(request, slots)
