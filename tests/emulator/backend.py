"""The emulator as a back end of mlx_h2o."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import pytest

from emulator import build
from emulator.kernel import EmulatedKernel, Run, metal_kernel
from emulator.text import MetalText
from mlx_h2o.operations.gpu import cuda, kernels, launch, metal
from mlx_h2o.operations.gpu.backend import KernelBackend
from mlx_h2o.operations.gpu.launches import Launch, LaunchPlan
from mlx_h2o.operations.requests import AttentionRequest

GPU = {"cuda": cuda.BACKEND, "metal": metal.BACKEND}.get(os.environ.get("MLX_H2O_GPU", ""))
"""Runs the cases in the emulator's place."""
if GPU is not None:
    mx.set_default_device(mx.cpu)  # what they are compared with


@dataclass(eq=False)
class EmulatorBackend(KernelBackend):
    """Serves what the Metal back end serves, by the same plan and the same text, evaluated at once
    and on any stream. Raises KernelError, BuildError.

    ``edit_source`` and ``edit_header`` change the text first, to show that a fault is caught.
    """

    run: Run = field(default_factory=Run)
    simdgroups: int | None = None
    blocks: int | None = None
    edit_source: Callable[[str], str] = str
    edit_header: Callable[[str], str] = str
    name: str = "emulator"

    def __post_init__(self) -> None:
        super().__init__()

    def unavailable_reason(self) -> str:
        """Why the emulator cannot run here; empty if it can."""
        return "" if build.compiler() else "no C++ compiler found (g++ or clang++)"

    def serves(self) -> bool:
        return True

    def uses_mlx(self, request: AttentionRequest) -> bool:
        return False

    def plan(self, request: AttentionRequest) -> LaunchPlan:
        return launch.plan(request, self.simdgroups, self.blocks)

    def execute(self, each: Launch, inputs: list[mx.array]) -> list[mx.array]:
        if GPU is None:
            return self._kernel(each)(inputs, **vars(each))
        if self.run.reads is not None or (self.edit_source, self.edit_header) != (str, str):
            pytest.skip("a GPU runs the text as it is, and counts no bytes")
        with mx.stream(mx.gpu):
            return GPU.execute(each, inputs)

    def text(self, plan: LaunchPlan) -> MetalText:
        """What MLX generates for a plan of one launch."""
        (text,) = self._texts(plan)
        return text

    def compile(self, request: AttentionRequest) -> Callable[[], object]:
        """What is left to do to have the request's kernels in the cache; any thread may do it."""
        texts = self.texts(request)
        if self.run.reads is not None:
            raise ValueError("kernels that count what they read are compiled when they run")
        return lambda: [build.compile_text(text, self.run.defines) for text in texts]

    def texts(self, request: AttentionRequest) -> list[MetalText]:
        """What MLX generates for the request, pass by pass."""
        return self._texts(self.plan(request))

    def _texts(self, plan: LaunchPlan) -> list[MetalText]:
        return [self._kernel(each).text(inputs, **vars(each)) for each, inputs in stand_ins(plan)]

    def _kernel(self, each: Launch) -> EmulatedKernel:
        return metal_kernel(
            each.kernel.name, each.kernel.inputs, each.kernel.outputs,
            self.edit_source(each.kernel.source), self.edit_header(kernels.HEADER),
            ensure_row_contiguous=False, run=self.run,
        )  # fmt: skip


Launched = list[tuple[Launch, list[mx.array]]]


@dataclass(eq=False)
class Recorder(EmulatorBackend):
    """Runs nothing, and keeps what it would run."""

    launched: Launched = field(default_factory=list)

    def execute(self, each: Launch, inputs: list[mx.array]) -> list[mx.array]:
        self.launched.append((each, inputs))
        outputs = zip(each.output_shapes, each.output_dtypes, strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]


def stand_ins(plan: LaunchPlan) -> Launched:
    """The launches of a plan with inputs of the right shapes; nothing runs."""
    recorder = Recorder()
    recorder.outputs(*plan)
    return recorder.launched
