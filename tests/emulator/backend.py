"""The emulator as a back end of mlx_h2o: ``backends.register("emulator", EmulatorBackend())``."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_h2o import kernels, launch
from mlx_h2o.launch import AttentionResult
from mlx_h2o.validate import AttentionRequest

from emulator import build
from emulator.kernel import Run, metal_kernel


@dataclass(frozen=True)
class EmulatorBackend:
    """Serves what the Metal back end serves, by the same plan and the same text."""

    run: Run = Run()
    simdgroups: int | None = None
    name: str = "emulator"

    def unavailable_reason(self) -> str:
        """Why the emulator cannot run here; empty if it can."""
        return "" if build.compiler() else "no C++ compiler found (g++ or clang++)"

    def refuses(self, request: AttentionRequest) -> str:
        """Why the kernels cannot serve this request; empty if they can."""
        return launch.refuses(request)

    def attention(self, request: AttentionRequest) -> AttentionResult:
        """Attention with scores, evaluated at once."""
        plan = launch.plan(request, self.simdgroups)
        kernel = metal_kernel(
            plan.kernel.name,
            plan.kernel.inputs,
            plan.kernel.outputs,
            plan.kernel.source,
            kernels.HEADER,
            ensure_row_contiguous=False,
            run=self.run,
        )
        outputs = kernel(
            plan.inputs,
            template=plan.template,
            grid=plan.grid,
            threadgroup=plan.threadgroup,
            output_shapes=plan.output_shapes,
            output_dtypes=plan.output_dtypes,
        )
        return plan.result(outputs)
