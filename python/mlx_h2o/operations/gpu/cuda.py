"""Back end "cuda": the same decode kernels through ``mx.fast.cuda_kernel``.

The shim in front of the shared header gives the Metal vocabulary its CUDA meaning. Tested on an
H100, but not tuned for it: docs/internals/kernels.md.
"""

from pathlib import Path

import mlx.core as mx

from mlx_h2o.operations.gpu import kernels
from mlx_h2o.operations.gpu.backend import KernelBackend


class Cuda(KernelBackend):
    """Kernels that MLX compiles for an NVIDIA GPU."""

    name = "cuda"

    def unavailable_reason(self) -> str:
        return "" if mx.cuda.is_available() else "MLX has no CUDA device on this machine"

    def advice(self) -> str:
        """How to make it available; empty on a machine without NVIDIA's driver."""
        return "pip install 'mlx[cuda13]'" if Path("/proc/driver/nvidia").exists() else ""

    def header(self, threads: int) -> str:
        """With the shim, and with launch bounds, which MLX's generated kernel lacks: without them
        the compiler may use more registers than a group of that size can have."""
        return f"#define H2O_MAX_THREADS {threads}\n{kernels.CUDA_SHIM}{kernels.HEADER}"


BACKEND = Cuda()
