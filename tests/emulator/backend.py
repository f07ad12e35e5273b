"""The emulator as a back end of mlx_h2o: ``backends.register("emulator", EmulatorBackend())``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from emulator import build
from emulator.kernel import EmulatedKernel, Run, metal_kernel
from emulator.text import MetalText
from mlx_h2o import kernels, launch
from mlx_h2o.launch import AttentionResult, LaunchPlan
from mlx_h2o.validate import AttentionRequest


def _unchanged(text: str) -> str:
    return text


@dataclass(frozen=True)
class EmulatorBackend:
    """Serves what the Metal back end serves, by the same plan and the same text.

    ``edit_source`` and ``edit_header`` change the text first, to show that a fault is caught.
    """

    run: Run = field(default_factory=Run)
    simdgroups: int | None = None
    edit_source: Callable[[str], str] = _unchanged
    edit_header: Callable[[str], str] = _unchanged
    name: str = "emulator"

    def unavailable_reason(self) -> str:
        """Why the emulator cannot run here; empty if it can."""
        return "" if build.compiler() else "no C++ compiler found (g++ or clang++)"

    def refuses(self, request: AttentionRequest) -> str:
        """Why the kernels cannot serve this request; empty if they can."""
        return launch.refuses(request)

    def attention(self, request: AttentionRequest) -> AttentionResult:
        """Attention with scores, evaluated at once. Raises KernelError, BuildError."""
        kernel, plan = self._prepare(request)
        return plan.result(kernel(plan.inputs, **plan.call()))

    def compile(self, request: AttentionRequest) -> Callable[[], object]:
        """What is left to do to have the request's kernel in the cache; any thread may do it."""
        text = self.text(request)
        return lambda: build.compile_text(text, self.run.defines)

    def text(self, request: AttentionRequest) -> MetalText:
        """What MLX generates for the request."""
        kernel, plan = self._prepare(request)
        return kernel.text(plan.inputs, **plan.call())

    def _prepare(self, request: AttentionRequest) -> tuple[EmulatedKernel, LaunchPlan]:
        plan = launch.plan(request, self.simdgroups)
        kernel = metal_kernel(
            plan.kernel.name,
            plan.kernel.inputs,
            plan.kernel.outputs,
            self.edit_source(plan.kernel.source),
            self.edit_header(kernels.HEADER),
            ensure_row_contiguous=False,
            run=self.run,
        )
        return kernel, plan
