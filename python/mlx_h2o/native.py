"""The native CPU back end: the SIMD kernels of core/, as MLX primitives.

It serves every valid request on a CPU stream: any sizes, float32, float16 and bfloat16.
"""

from __future__ import annotations

import functools
from types import ModuleType

import mlx.core as mx

from mlx_h2o.validate import AttentionRequest, RetentionRequest, runs_on_gpu

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
    except ValueError as error:  # MLX_H2O_SIMD
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


def unavailable_reason() -> str:
    """Empty where the extension is installed and fits the MLX of this process."""
    return _state()[1]


def refuses(request: AttentionRequest) -> str:
    """Empty for every request on a CPU stream."""
    return "it runs on CPU streams, found a GPU stream" if runs_on_gpu(request.stream) else ""


def attention(request: AttentionRequest) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Attention output, scores and lse as ``fast`` documents them."""
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
