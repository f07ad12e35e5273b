"""Back end "metal": the decode kernels through ``mx.fast.metal_kernel``.

MLX compiles a kernel when it is first used. How many threads a compiled kernel may run with
depends on the registers it came to need and cannot be asked for, so the first use of a variant
tries a tiny call and halves the number of simdgroups until MLX takes it.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import cast

import mlx.core as mx

from mlx_h2o import kernels, launch
from mlx_h2o.kernels import Kernel
from mlx_h2o.launch import AttentionResult, LaunchPlan
from mlx_h2o.validate import AttentionRequest, StreamLike, runs_on_gpu

name = "metal"

# How MLX says that a pipeline cannot run with as many threads as were asked for.
_TOO_MANY_THREADS = "Thread group size"

_simdgroups: dict[Hashable, int] = {}


def unavailable_reason() -> str:
    """Why the back end cannot run on this machine; empty if it can."""
    return "" if mx.metal.is_available() else "MLX has no Metal device on this machine"


def refuses(request: AttentionRequest) -> str:
    """Why the back end cannot serve this request; empty if it can."""
    if not runs_on_gpu(request.stream):
        return "Metal kernels run on GPU streams, found a CPU stream"
    return launch.refuses(request)


def attention(request: AttentionRequest) -> AttentionResult:
    """Attention with scores. The first call of a variant compiles it and evaluates a tiny case."""
    return _run(launch.plan(request, _simdgroups_for(request)), request.stream)


def _run(plan: LaunchPlan, stream: StreamLike) -> AttentionResult:
    kernel = _metal_kernel(plan.kernel)
    return plan.result(kernel(inputs=list(plan.inputs), stream=stream, **plan.call()))


@cache
def _metal_kernel(kernel: Kernel) -> Callable[..., list[mx.array]]:
    # Row contiguity is not asked for: that would copy a sliced cache on every step.
    compiled = mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=kernels.HEADER,
        ensure_row_contiguous=False,
    )
    return cast(Callable[..., list[mx.array]], compiled)


def _simdgroups_for(request: AttentionRequest) -> int:
    """The number of simdgroups that this variant runs with on this machine."""
    # Everything that the compiled text depends on, but for the number itself.
    variant = (
        launch.flags_of(request),
        request.causal,
        request.queries.dtype,
        None if request.mask is None else request.mask.dtype,
        None if request.sinks is None else request.sinks.dtype,
        request.keys.shape[3],
        request.values.shape[3],
    )
    if variant not in _simdgroups:
        _simdgroups[variant] = _find_simdgroups(_tiny(request))
    return _simdgroups[variant]


def _tiny(request: AttentionRequest) -> AttentionRequest:
    """A request for the same variant, of one query, one head and one key."""

    def zeros(array: mx.array, *shape: int) -> mx.array:
        return mx.zeros(shape, array.dtype)

    return replace(
        request,
        queries=zeros(request.queries, 1, 1, 1, request.queries.shape[3]),
        keys=zeros(request.keys, 1, 1, 1, request.keys.shape[3]),
        values=zeros(request.values, 1, 1, 1, request.values.shape[3]),
        mask=None if request.mask is None else zeros(request.mask, 1, 1, 1, 1),
        sinks=None if request.sinks is None else zeros(request.sinks, 1),
    )


def _find_simdgroups(tiny: AttentionRequest) -> int:
    simdgroups = launch.preferred_simdgroups(tiny.keys.shape[3], tiny.values.shape[3])
    while True:
        try:
            mx.eval(_run(launch.plan(tiny, simdgroups), tiny.stream)[0])
        except ValueError as error:
            if _TOO_MANY_THREADS not in str(error) or simdgroups == 1:
                raise
            simdgroups //= 2
        else:
            return simdgroups
