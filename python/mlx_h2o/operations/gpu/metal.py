"""Back end "metal": the decode kernels through ``mx.fast.metal_kernel``.

MLX compiles a kernel when it is first used. How many threads a compiled kernel can run with
depends on the registers that it needs, and cannot be queried. So the first use of a variant tries
the preferred number of simdgroups, and halves it until MLX accepts it.
"""

import mlx.core as mx

from mlx_h2o.operations.gpu import launch
from mlx_h2o.operations.gpu.backend import KernelBackend
from mlx_h2o.operations.gpu.launches import Launch
from mlx_h2o.operations.requests import AttentionRequest

# In MLX's error for a pipeline that cannot run with the requested number of threads.
_TOO_MANY_THREADS = "Thread group size"


class Metal(KernelBackend):
    """Kernels that MLX compiles for an Apple GPU."""

    name = "metal"

    def __init__(self) -> None:
        super().__init__()
        self.simdgroups: dict[tuple[object, ...], int] = {}
        """How many each variant runs with on this machine."""

    def unavailable_reason(self) -> str:
        return "" if mx.metal.is_available() else "MLX has no Metal device on this machine"

    def passes(self, request: AttentionRequest, text: tuple[object, ...]) -> tuple[Launch, ...]:
        """The first call of a variant compiles and runs it."""
        simdgroups = launch.preferred_simdgroups(request.queries.shape[3], request.value_size)
        blocks = launch.preferred_blocks(request.row_count, simdgroups)
        key = text, blocks > 1
        while key not in self.simdgroups:
            plan = launch.plan(request, simdgroups, blocks)
            try:
                mx.eval(dict(plan.given))
                mx.eval(self.outputs(*plan)["out"])
            except ValueError as error:
                if _TOO_MANY_THREADS not in str(error) or simdgroups == 1:
                    raise
                simdgroups //= 2
            else:
                self.simdgroups[key] = simdgroups
        return launch.passes(request, self.simdgroups[key], blocks)


BACKEND = Metal()
