"""The moving average of scores: of scores that are there, and in one operation with attention.

Re-exported by ``fast``. Each call is validated, then served by the best back end (``backends``).
"""

from typing import Any, overload

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
from mlx_h2o.operations.replace_requests import Packed
from mlx_h2o.operations.validate import RetentionRequest
from mlx_h2o.operations.validate_quantized import QuantizedAttentionRequest

__all__ = ["accumulate_scores", "attention_and_accumulate"]


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
