"""The native CPU back end: the SIMD kernels of core/, as MLX primitives.

It serves every valid request on a CPU stream: any sizes, float32, float16 and bfloat16, dense rows
and packed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_h2o.operations import composed_cache
from mlx_h2o.operations.cache_requests import (
    AccumulateRequest,
    AttentionAccumulateRequest,
    KeyDiversityRequest,
    PrefillRequest,
    ReplaceRequest,
)
from mlx_h2o.operations.native_module import required as _module
from mlx_h2o.operations.native_module import unavailable_reason as unavailable_reason
from mlx_h2o.operations.native_tiers import replaced_in_tiers, unpacked_tiers
from mlx_h2o.operations.tier_requests import TierRequest, TierRows
from mlx_h2o.operations.validate import AttentionRequest, RetentionRequest, runs_on_gpu
from mlx_h2o.operations.validate_quantized import QuantizedAttentionRequest

if TYPE_CHECKING:  # the module finds this one through the back ends
    from mlx_h2o.operations.quantize_append import QuantizeAppendRequest, Quantized
    from mlx_h2o.operations.row_exchange import RowExchange

name = "native"


def refuses(request: AttentionRequest | QuantizedAttentionRequest) -> str:
    """Empty for every request on a CPU stream."""
    return "it runs on CPU streams, found a GPU stream" if runs_on_gpu(request.stream) else ""


def attention(request: AttentionRequest) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Attention output, scores and lse as ``fast`` documents them."""
    if not (request.return_scores or request.return_lse):
        out = _module().scaled_dot_product_attention(
            request.queries,
            request.keys,
            request.values,
            scale=request.scale,
            causal=request.causal,
            mask=request.mask,
            sinks=request.sinks,
            stream=request.stream,
        )
        return out, None, None
    return _attend(request)[0][:3]


def quantized_attention(
    request: QuantizedAttentionRequest,
) -> tuple[mx.array, mx.array | None, mx.array | None, mx.array | None]:
    """The same of packed rows, and the share of rows that sparse V left out."""
    return _attend(request)[0]


def attention_with_probes(
    request: AttentionRequest | QuantizedAttentionRequest,
) -> tuple[tuple[mx.array, mx.array | None, mx.array | None], mx.array]:
    """The same, and the scores of the probes, in one read of the keys."""
    results, found = _attend(request)
    assert found is not None
    return results[:3], found


def _attend(
    request: AttentionRequest | QuantizedAttentionRequest,
) -> tuple[
    tuple[mx.array, mx.array | None, mx.array | None, mx.array | None],
    mx.array | None,
]:
    """Out, scores, lse and the share skipped; and the scores of the probes."""
    keys, values, options = _rows(request)
    results = iter(
        _module().attention(
            request.queries,
            keys,
            values,
            scale=request.scale,
            causal=request.causal,
            mask=request.mask,
            sinks=request.sinks,
            probes=request.probes,
            return_scores=request.return_scores,
            return_lse=request.return_lse,
            stream=request.stream,
            **options,
        )
    )
    out = next(results)
    scores = next(results) if request.return_scores else None
    lse = next(results) if request.return_lse else None
    skipped = next(results) if options.get("return_skipped") else None
    return (out, scores, lse, skipped), next(results, None)


def _rows(
    request: AttentionRequest | QuantizedAttentionRequest,
) -> tuple[list[mx.array], list[mx.array], dict[str, Any]]:
    """The arrays of keys and of values, and the options of packed ones."""
    if isinstance(request, AttentionRequest):
        return [request.keys], [request.values], {}
    keys, values = request.keys, request.values
    options = {
        "bits": keys.bits,
        "value_bits": values.bits,
        "group_size": keys.group_size,
        "sparse_threshold": request.sparse_v_threshold,
        "return_skipped": request.return_skipped,
    }
    packed = ([rows.words, rows.scales, rows.biases] for rows in (keys, values))
    return next(packed), next(packed), options


def keep_indices(request: RetentionRequest) -> mx.array:
    """Slots of the rows to keep, uint32 [B, H, N - count], ascending."""
    slots: mx.array = _module().keep_indices(
        request.scores,
        request.positions,
        keep=request.scores.shape[2] - request.count,
        sink_size=request.sink_size,
        recent_start=request.recent_start,
        stream=request.stream,
    )
    return slots


def evict_indices(request: RetentionRequest) -> mx.array:
    """Slots of the ``count`` rows to drop, uint32 [B, H, count], the worst first."""
    slots: mx.array = _module().evict_indices(
        request.scores,
        request.positions,
        count=request.count,
        sink_size=request.sink_size,
        recent_start=request.recent_start,
        stream=request.stream,
    )
    return slots


def attention_and_accumulate(request: AttentionAccumulateRequest) -> tuple[mx.array, ...]:
    """Attention output, the new importance and, where asked for, the row that goes next; the
    scores stay inside."""
    attention = request.attention
    keys, values, options = _rows(attention)
    return tuple(
        _module().attention(
            attention.queries,
            keys,
            values,
            scale=attention.scale,
            causal=attention.causal,
            mask=attention.mask,
            sinks=attention.sinks,
            importance=request.importance,
            decay=request.decay,
            positions=request.positions,
            sink_size=request.sink_size,
            recent_start=request.recent_start,
            stream=attention.stream,
            **{**options, "return_skipped": False},
        )
    )


def accumulate_scores(request: AccumulateRequest) -> mx.array:
    """The new importance, float32 [B, H, N]."""
    importance: mx.array = _module().accumulate_scores(
        request.importance, request.scores, decay=request.decay, stream=request.stream
    )
    return importance


def prefill_scores(request: PrefillRequest) -> mx.array:
    """The moving average or the mass of a chunk, float32 [B, Hkv, N]."""
    attention = request.attention
    scores: mx.array = _module().prefill_scores(
        attention.queries,
        attention.keys,
        scale=attention.scale,
        causal=attention.causal,
        mask=attention.mask,
        sinks=attention.sinks,
        decay=request.decay if request.kind == "ema" else None,
        importance=request.importance,
        stream=request.stream,
    )
    return scores


def key_diversity(request: KeyDiversityRequest) -> mx.array:
    """Minus the cosine of each key with the mean normalised key, float32 [B, H, N]."""
    ranks: mx.array = _module().key_diversity(request.keys, stream=request.stream)
    return ranks


def replace_worst(request: ReplaceRequest) -> tuple[Any, ...]:
    """Keys, values, importance, positions and statistics, in the memory of the inputs where that
    is free."""
    ranks: mx.array | str = request.ranks
    if request.is_packed and ranks == "key_diversity" and request.worst is None:
        ranks = composed_cache.retention_of(request).scores
    given = isinstance(ranks, mx.array)
    keys, values = request.keys, request.values
    results = _module().replace_worst(
        [*keys] if request.is_packed else [keys],
        [*values] if request.is_packed else [values],
        request.importance,
        request.positions,
        request.new_keys,
        request.new_values,
        position=request.position,
        sink_size=request.sink_size,
        recent_start=request.recent_start,
        ranked_by="array" if given else ranks,
        ranks=ranks if given else None,
        worst=request.worst,
        statistics=[] if request.statistics is None else [*request.statistics],
        bits=request.bits,
        group_size=request.group_size,
        value_bits=request.v_bits,
        stream=request.stream,
    )
    if request.is_packed:
        return (tuple(results[:3]), tuple(results[3:6]), *results[6:])
    return tuple(results)


def exchange_rows(request: RowExchange) -> list[mx.array]:
    """The buffers, in their own memory where that is free, then the rows that were there."""
    results: list[mx.array] = _module().exchange_rows(
        request.buffers, request.slots, request.rows or [], start=request.start
    )
    return results


def quantize_append(request: QuantizeAppendRequest) -> tuple[Quantized, Quantized]:
    """Keys and values as ``fast`` documents them, in the memory of the inputs where it is free."""
    kw, ks, kb, vw, vs, vb = _module().quantize_append(
        list(request.keys),
        list(request.values),
        request.new_keys,
        request.new_values,
        request.slots,
        bits=request.bits,
        group_size=request.group_size,
        value_bits=request.v_bits,
        stream=request.stream,
    )
    return (kw, ks, kb), (vw, vs, vb)


def replace_in_tiers(request: TierRequest) -> TierRequest:
    """The rows after the replacement, in the memory of the inputs where that is free."""
    return replaced_in_tiers(_module(), request)


def merge_segments(
    outs: Sequence[mx.array], lses: Sequence[mx.array], scores: Sequence[mx.array]
) -> tuple[mx.array, mx.array, mx.array]:
    """Output, lse and scores of all segments of the rows."""
    out, lse, joined = _module().merge_segments([*outs], [*lses], [*scores])
    return out, lse, joined


def rows_as_arrays(
    tiers: Sequence[TierRows], keys: mx.array, values: mx.array, group_size: int
) -> tuple[mx.array, mx.array]:
    """Keys and values of all segments, the packed ones dequantised in float32."""
    return unpacked_tiers(_module(), tiers, keys, values, group_size)
