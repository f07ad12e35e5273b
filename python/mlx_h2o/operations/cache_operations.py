"""Operations on the rows of a cache: the moving average of scores, ranks, and replacement.

Re-exported by ``fast``. Each call is validated, then served by the best back end (``backends``).
"""

from typing import Any, TypeVar, overload

import mlx.core as mx

from mlx_h2o.operations import cache_requests, composed_cache
from mlx_h2o.operations.arguments import StreamLike
from mlx_h2o.operations.backends import (
    for_attention,
    for_quantized_attention,
    for_retention,
    operation_of,
)
from mlx_h2o.operations.cache_requests import AccumulateRequest, AttentionAccumulateRequest
from mlx_h2o.operations.placement import placed
from mlx_h2o.operations.replace_requests import Packed, RankName, ReplaceRequest, Statistics
from mlx_h2o.operations.validate import RetentionRequest
from mlx_h2o.operations.validate_quantized import QuantizedAttentionRequest

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


@overload
def attention_and_accumulate(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    importance: mx.array,
    *,
    scale: float,
    decay: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    positions: None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    sparse_v_threshold: float = 0.0,
    stream: StreamLike = None,
) -> tuple[mx.array, mx.array]: ...


@overload
def attention_and_accumulate(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    importance: mx.array,
    *,
    scale: float,
    decay: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    positions: mx.array,
    sink_size: int = 0,
    recent_start: int | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    sparse_v_threshold: float = 0.0,
    stream: StreamLike = None,
) -> tuple[mx.array, mx.array, mx.array]: ...


def attention_and_accumulate(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    importance: mx.array,
    *,
    scale: float,
    decay: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    positions: mx.array | None = None,
    sink_size: int = 0,
    recent_start: int | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    sparse_v_threshold: float = 0.0,
    stream: StreamLike = None,
) -> tuple[mx.array, mx.array] | tuple[mx.array, mx.array, mx.array]:
    """Attention whose scores go into a moving average; a back end need not store them.

    ``scaled_dot_product_attention_with_scores`` followed by ``accumulate_scores``, with the
    arguments and errors of both; at most 128 queries. ``importance`` has the heads of the keys.
    ``k`` and ``v`` may be packed, each a tuple of words, scales and biases: then it is the
    quantised operation, and ``bits``, ``group_size``, ``v_bits`` and ``sparse_v_threshold`` are
    its arguments.

    With ``positions``, int32 [B, Hkv, N], the row is named that ``evict_indices`` of the new
    importance, these positions, ``sink_size`` and ``recent_start`` names: what the next
    ``replace_worst`` may be given as ``worst``.

    Returns:
        ``(out, importance)``: [B, Hq, Lq, Dv] in the dtype of the queries, and float32
        [B, Hkv, N]. With ``positions`` also ``worst``, uint32 [B, Hkv]. Evaluating ``out``
        evaluates all.
    """
    request = cache_requests.attention_accumulate_request(
        q, k, v, importance, scale=scale, decay=decay, mask=mask, sinks=sinks,
        positions=positions, sink_size=sink_size, recent_start=recent_start, bits=bits,
        group_size=group_size, v_bits=v_bits, sparse_v_threshold=sparse_v_threshold,
        stream=stream,
    )  # fmt: skip
    return serve_attention_and_accumulate(request)


def serve_attention_and_accumulate(
    request: AttentionAccumulateRequest,
) -> tuple[mx.array, mx.array] | tuple[mx.array, mx.array, mx.array]:
    """``attention_and_accumulate`` for arguments that are known to be right."""
    attention = request.attention
    op = "attention_and_accumulate"
    backend: Any
    if isinstance(attention, QuantizedAttentionRequest):
        backend = for_quantized_attention(attention, op=op)
        attend = backend.quantized_attention
    else:
        backend = for_attention(attention, op=op)
        attend = backend.attention
    fused = getattr(backend, op, None)
    if fused is not None:
        served: tuple[mx.array, mx.array] | tuple[mx.array, mx.array, mx.array] = fused(request)
        return served
    out, scores = attend(attention)[:2]
    masked = attention.mask is not None or (attention.causal and scores.shape[2] > 1)
    following = AccumulateRequest(
        request.importance, scores, request.decay, masked, attention.stream
    )
    importance = _accumulate(following)
    if request.positions is None:
        # Untied, the scores of every step would wait for someone to ask, graph and all.
        out = mx.depends(out, [importance])
        return out, importance
    zones = request.sink_size, request.recent_start
    retention = RetentionRequest(importance, request.positions, 1, *zones, attention.stream)
    slots = for_retention("evict_indices", retention)(retention)
    with placed(attention.stream):
        worst = mx.squeeze(slots, 2)
        out = mx.depends(out, [importance, worst])
    return out, importance, worst


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


K = TypeVar("K", mx.array, Packed)
V = TypeVar("V", mx.array, Packed)


@overload
def replace_worst(
    keys: K,
    values: V,
    importance: mx.array,
    positions: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    *,
    position: int,
    sink_size: int = 0,
    recent_start: int | None = None,
    ranks: mx.array | RankName | None = None,
    worst: mx.array | None = None,
    statistics: None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    stream: StreamLike = None,
) -> tuple[K, V, mx.array, mx.array]: ...


@overload
def replace_worst(
    keys: K,
    values: V,
    importance: mx.array,
    positions: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    *,
    position: int,
    sink_size: int = 0,
    recent_start: int | None = None,
    ranks: mx.array | RankName | None = None,
    worst: mx.array | None = None,
    statistics: Statistics,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    stream: StreamLike = None,
) -> tuple[K, V, mx.array, mx.array, mx.array, mx.array]: ...


def replace_worst(
    keys: mx.array | Packed,
    values: mx.array | Packed,
    importance: mx.array,
    positions: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    *,
    position: int,
    sink_size: int = 0,
    recent_start: int | None = None,
    ranks: mx.array | RankName | None = None,
    worst: mx.array | None = None,
    statistics: Statistics | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    stream: StreamLike = None,
) -> tuple[Any, ...]:
    """Steady-state eviction: in each head a new row takes the place of the worst one.

    The row is the one that ``evict_indices(ranks, positions, count=1)`` names, or the one that
    ``worst`` names, which costs no search. Its key and value become the new ones, quantised where
    the rows are; its importance NaN (not yet scored), its position ``position``.

    Args:
        keys: [B, H, N, D], float32, float16 or bfloat16; or packed as ``mx.quantize`` packs them:
            a tuple of words, scales and biases.
        values: [B, H, N, Dv], of one of these dtypes; packed where the keys are.
        importance: float32 [B, H, N].
        positions: int32 [B, H, N], distinct within a head; negative: padding.
        new_keys: [B, H, 1, D], the dtype of the keys, or of their scales.
        new_values: [B, H, 1, Dv], the dtype of the values, or of their scales.
        position: of the new row, 0 to 2**30 - 1.
        sink_size: the first positions, which are protected.
        recent_start: the first position of the protected recent window; None: no window.
        ranks: float32 [B, H, N], or the name of what they would be: "importance" (as None), "age"
            (the oldest row goes), "key_diversity" (the function of this name).
        worst: uint32 [B, H], the slots to write, as ``attention_and_accumulate`` returns them;
            one beyond the last row means the last row. Not together with ``ranks``.
        statistics: what ``key_statistics`` returned for these keys, to be kept up to date.
        bits: per element of packed keys, and of packed values unless ``v_bits`` is given.
        group_size: of packed rows.
        v_bits: per element of packed values.
        stream: stream or device to run on.

    Returns:
        keys, values, importance and positions; with ``statistics`` then ``key_sum`` and
        ``inverse_norms``. Evaluating the keys evaluates all. The arrays that were passed never
        change; where nothing else holds them, a back end may write into their memory, so that a
        row costs no copy of the others (native: always; composed: where MLX's own scatter does).

    Raises:
        ValueError: shapes, dtypes or numbers other than these.
        TypeError: an argument that is not an array or an integer where one is expected.
    """
    request = cache_requests.replace_request(
        keys, values, importance, positions, new_keys, new_values, position=position,
        sink_size=sink_size, recent_start=recent_start, ranks=ranks, worst=worst,
        statistics=statistics, bits=bits, group_size=group_size, v_bits=v_bits, stream=stream,
    )  # fmt: skip
    return serve_replacement(request)


def serve_replacement(request: ReplaceRequest) -> tuple[Any, ...]:
    """``replace_worst`` for arguments that are known to be right, such as a store's own."""
    served = operation_of("replace_worst", request.stream)
    if served is not None:
        result: tuple[Any, ...] = served(request)
        return result
    if request.worst is not None:
        return composed_cache.replace_worst(request)
    retention = composed_cache.retention_of(request)
    slots = for_retention("evict_indices", retention)(retention)
    return composed_cache.written(request, slots)
