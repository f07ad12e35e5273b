"""The native CPU back end: the SIMD kernels of core/, as MLX primitives.

It serves every valid request on a CPU stream: any sizes, float32, float16 and bfloat16.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_h2o import composed_cache
from mlx_h2o.cache_requests import (
    AccumulateRequest,
    AttentionAccumulateRequest,
    KeyDiversityRequest,
    PrefillRequest,
    ReplaceRequest,
)
from mlx_h2o.validate import AttentionRequest, RetentionRequest, runs_on_gpu

if TYPE_CHECKING:  # the module finds this one through the back ends
    from mlx_h2o.quantize_append import QuantizeAppendRequest, Quantized

name = "native"


# Not in the stubs of mlx.core.
_MLX_VERSION = str(vars(mx)["__version__"])


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def fault_of(module: ModuleType) -> str:
    """Why an extension that could be imported does not fit this process; empty if it fits.

    MLX promises its C++ interface, and nanobind its type registry, only within one minor
    version: an extension built for another could crash, so nothing of it is called before this.
    """
    built_for = str(module.built_for_mlx)
    if _minor(built_for) != _minor(_MLX_VERSION):
        return f"the extension was built for MLX {built_for}, found MLX {_MLX_VERSION}"
    try:
        module.ndim(mx.zeros(()))
    except TypeError:
        return (
            "the extension does not know mlx.core.array: it was built with another version of "
            "nanobind than MLX"
        )
    try:
        module.simd_target()
        module.threads()
    except ValueError as error:  # MLX_H2O_SIMD, MLX_H2O_THREADS
        return str(error)
    return ""


@functools.cache
def _state() -> tuple[ModuleType | None, str]:
    """The extension, or None and the reason."""
    try:
        from mlx_h2o import _core
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) or "cannot import name" in str(error):
            return None, "the extension mlx_h2o._core is not installed (built without a compiler?)"
        return None, f"the extension mlx_h2o._core cannot be loaded: {error}"
    fault = fault_of(_core)
    return (None, fault) if fault else (_core, "")


def _module() -> ModuleType:
    module, reason = _state()
    if module is None:
        raise ValueError(f"[native] back end 'native' is not available: {reason}")
    return module


def module_or_none() -> ModuleType | None:
    """The extension where it is installed and fits, for settings that need no back end."""
    return _state()[0]


def unavailable_reason() -> str:
    """Empty where the extension is installed and fits the MLX of this process."""
    return _state()[1]


def refuses(request: AttentionRequest) -> str:
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
    results = _module().scaled_dot_product_attention_with_scores(
        request.queries,
        request.keys,
        request.values,
        scale=request.scale,
        causal=request.causal,
        mask=request.mask,
        sinks=request.sinks,
        return_lse=request.return_lse,
        stream=request.stream,
    )
    scores = results[1] if request.return_scores else None
    return results[0], scores, results[2] if request.return_lse else None


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


def fuses(request: AttentionAccumulateRequest) -> bool:
    """Whether ``attention_and_accumulate`` here takes the request."""
    return isinstance(request.attention, AttentionRequest) and request.positions is None


def attention_and_accumulate(request: AttentionAccumulateRequest) -> tuple[mx.array, mx.array]:
    """Attention output and the new importance; the scores stay inside."""
    attention = request.attention
    assert isinstance(attention, AttentionRequest)
    out, importance = _module().attention_and_accumulate(
        attention.queries,
        attention.keys,
        attention.values,
        request.importance,
        scale=attention.scale,
        decay=request.decay,
        causal=attention.causal,
        mask=attention.mask,
        sinks=attention.sinks,
        stream=attention.stream,
    )
    return out, importance


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
