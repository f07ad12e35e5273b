"""Back end "metal": the decode kernels through ``mx.fast.metal_kernel``.

MLX compiles a kernel when it is first used. How many threads a compiled kernel may run with
depends on the registers it came to need and cannot be asked for, so the first use of a variant
tries a tiny call and halves the number of simdgroups until MLX takes it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_h2o.operations.arguments import StreamLike, runs_on_gpu
from mlx_h2o.operations.gpu import kernels, launch
from mlx_h2o.operations.gpu.kernels import Kernel
from mlx_h2o.operations.gpu.launch import Text, Variant
from mlx_h2o.operations.gpu.launches import Execute, Launch, LaunchPlan
from mlx_h2o.operations.gpu.row_kernels import RowKernels
from mlx_h2o.operations.requests import (
    AttentionAccumulateRequest,
    AttentionRequest,
    AttentionResult,
    StoredRows,
    TurboRows,
)

name = "metal"

# How MLX says that a pipeline cannot run with as many threads as were asked for.
_TOO_MANY_THREADS = "Thread group size"

_simdgroups: dict[tuple[Text, bool], int] = {}


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
    return _plan(request).run(_executor(request.stream))


def attention_and_accumulate(request: AttentionAccumulateRequest) -> tuple[mx.array, mx.array]:
    """The same, and the moving average of the scores, in a kernel of its own."""
    return _rows.attention_and_accumulate(request, _plan(request.attention))


def _plan(request: AttentionRequest) -> LaunchPlan:
    variant = launch.variant_of(request)
    return launch.plan(request, *_sizes_for(request, variant), variant)


def _executor(stream: StreamLike) -> Execute:
    def execute(each: Launch, inputs: list[mx.array]) -> list[mx.array]:
        return _metal_kernel(each.kernel)(inputs=inputs, stream=stream, **each.call)

    return execute


_rows = RowKernels(_executor)
accumulate_scores = _rows.accumulate_scores
keep_indices = _rows.keep_indices
encode_rows = _rows.encode_rows
append_quantized = _rows.append_quantized
quantize_append = _rows.quantize_append
prefill_scores = _rows.prefill_scores


@cache
def _metal_kernel(kernel: Kernel) -> Callable[..., list[mx.array]]:
    return kernels.compiled(mx.fast.metal_kernel, kernel, kernels.HEADER)


def _sizes_for(request: AttentionRequest, variant: Variant) -> tuple[int, int]:
    """Simdgroups that this variant runs with on this machine, and blocks of keys."""
    text = variant.text
    preferred = launch.preferred_simdgroups(text.head_size, text.value_size)
    blocks = launch.preferred_blocks(variant.key_count, preferred)
    key = text, blocks > 1
    if key not in _simdgroups:
        _simdgroups[key] = _find_simdgroups(_tiny(request), preferred, min(blocks, 2))
    return _simdgroups[key], blocks


def _tiny(request: AttentionRequest) -> AttentionRequest:
    """A request for the same variant, of one query, one head and one key."""

    def zeros(array: mx.array, *shape: int) -> mx.array:
        return mx.zeros(shape, array.dtype)

    def row(array: mx.array) -> mx.array:
        return zeros(array, 1, 1, 1, array.shape[3])

    def rows(found: StoredRows) -> StoredRows:
        if isinstance(found, mx.array):
            return row(found)
        if isinstance(found, TurboRows):
            return replace(found, words=row(found.words), norms=row(found.norms))
        return replace(
            found, words=row(found.words), scales=row(found.scales), biases=row(found.biases)
        )

    changes: dict[str, Any] = {
        "queries": row(request.queries),
        "keys": rows(request.keys),
        "values": rows(request.values),
        "mask": None if request.mask is None else zeros(request.mask, 1, 1, 1, 1),
        "sinks": None if request.sinks is None else zeros(request.sinks, 1),
    }
    return replace(request, **changes)


def _find_simdgroups(tiny: AttentionRequest, simdgroups: int, blocks: int) -> int:
    while True:
        try:
            mx.eval(launch.plan(tiny, simdgroups, blocks).run(_executor(tiny.stream)).out)
        except ValueError as error:
            if _TOO_MANY_THREADS not in str(error) or simdgroups == 1:
                raise
            simdgroups //= 2
        else:
            return simdgroups
