"""Back end "cuda": the same decode kernels through ``mx.fast.cuda_kernel``.

The shim in front of the shared header gives the Metal vocabulary its CUDA meaning. This back
end has been compiled (by NVRTC, in the tests) and has not been run on a GPU.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import mlx.core as mx

from mlx_h2o.operations.arguments import StreamLike, runs_on_gpu
from mlx_h2o.operations.gpu import kernels, launch
from mlx_h2o.operations.gpu.kernels import Kernel
from mlx_h2o.operations.gpu.launches import Execute, Launch
from mlx_h2o.operations.gpu.row_kernels import RowKernels
from mlx_h2o.operations.requests import (
    AttentionAccumulateRequest,
    AttentionRequest,
    AttentionResult,
)

name = "cuda"


def unavailable_reason() -> str:
    """Why the back end cannot run on this machine; empty if it can."""
    module = getattr(mx, "cuda", None)
    if module is not None and module.is_available():
        return ""
    return "MLX has no CUDA device on this machine"


def advice() -> str:
    """How to make it available; empty on a machine without NVIDIA's driver."""
    return "pip install 'mlx[cuda13]'" if Path("/proc/driver/nvidia").exists() else ""


def refuses(request: AttentionRequest) -> str:
    """Why the back end cannot serve this request; empty if it can."""
    if not runs_on_gpu(request.stream):
        return "CUDA kernels run on GPU streams, found a CPU stream"
    return launch.refuses(request)


def header(threads: int) -> str:
    """What stands before a kernel that runs with ``threads`` threads per threadgroup.

    MLX's generated kernel has no launch bounds, without which the compiler may use more
    registers than a group of that size can have; the shim adds them.
    """
    return f"#define H2O_MAX_THREADS {threads}\n{kernels.CUDA_SHIM}{kernels.HEADER}"


def attention(request: AttentionRequest) -> AttentionResult:
    """Attention with scores."""
    return launch.plan(request).run(_executor(request.stream))


def attention_and_accumulate(request: AttentionAccumulateRequest) -> tuple[mx.array, mx.array]:
    """The same, and the moving average of the scores, in a kernel of its own."""
    return _rows.attention_and_accumulate(request, launch.plan(request.attention))


def _executor(stream: StreamLike) -> Execute:
    def execute(each: Launch, inputs: list[mx.array]) -> list[mx.array]:
        kernel = _cuda_kernel(each.kernel, each.threadgroup[0])
        return kernel(inputs=inputs, stream=stream, **each.call)

    return execute


_rows = RowKernels(_executor)
accumulate_scores = _rows.accumulate_scores
keep_indices = _rows.keep_indices
encode_rows = _rows.encode_rows
append_quantized = _rows.append_quantized
quantize_append = _rows.quantize_append
prefill_scores = _rows.prefill_scores


@cache
def _cuda_kernel(kernel: Kernel, threads: int) -> Callable[..., list[mx.array]]:
    return kernels.compiled(mx.fast.cuda_kernel, kernel, header(threads))
