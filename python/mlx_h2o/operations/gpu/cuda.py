"""Back end "cuda": the same decode kernels through ``mx.fast.cuda_kernel``.

The shim in front of the shared header gives the Metal vocabulary its CUDA meaning. Right on an
H100, and not tuned for it: docs/internals/kernels.md.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import mlx.core as mx

from mlx_h2o.operations.arguments import StreamLike
from mlx_h2o.operations.gpu import kernels
from mlx_h2o.operations.gpu.backend import KernelBackend
from mlx_h2o.operations.gpu.kernels import Kernel
from mlx_h2o.operations.gpu.launches import Launch


def header(threads: int) -> str:
    """What stands before a kernel that runs with ``threads`` threads per threadgroup.

    MLX's generated kernel has no launch bounds, without which the compiler may use more
    registers than a group of that size can have; the shim adds them.
    """
    return f"#define H2O_MAX_THREADS {threads}\n{kernels.CUDA_SHIM}{kernels.HEADER}"


@cache
def _cuda_kernel(kernel: Kernel, threads: int) -> Callable[..., list[mx.array]]:
    return kernels.compiled(mx.fast.cuda_kernel, kernel, header(threads))


class Cuda(KernelBackend):
    """Kernels that MLX compiles for an NVIDIA GPU."""

    name, title = "cuda", "CUDA"

    def unavailable_reason(self) -> str:
        return "" if mx.cuda.is_available() else "MLX has no CUDA device on this machine"

    def advice(self) -> str:
        """How to make it available; empty on a machine without NVIDIA's driver."""
        return "pip install 'mlx[cuda13]'" if Path("/proc/driver/nvidia").exists() else ""

    def execute(self, each: Launch, inputs: list[mx.array], stream: StreamLike) -> list[mx.array]:
        kernel = _cuda_kernel(each.kernel, each.threadgroup[0])
        return kernel(inputs=inputs, stream=stream, **each.call)


BACKEND = Cuda()
