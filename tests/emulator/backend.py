"""The emulator as a back end of mlx_h2o: ``backends.register("emulator", EmulatorBackend())``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from emulator import build
from emulator.kernel import EmulatedKernel, Run, metal_kernel
from emulator.text import MetalText
from mlx_h2o.operations.gpu import kernels, launch
from mlx_h2o.operations.gpu.launches import Launch, LaunchPlan
from mlx_h2o.operations.gpu.row_kernels import RowKernels
from mlx_h2o.operations.requests import (
    AccumulateRequest,
    AttentionAccumulateRequest,
    AttentionRequest,
    AttentionResult,
    Codes,
    Parts,
    PrefillRequest,
    QuantizeAppendRequest,
    RetentionRequest,
)


def _unchanged(text: str) -> str:
    return text


@dataclass(frozen=True)
class EmulatorBackend:
    """Serves what the Metal back end serves, by the same plan and the same text.

    ``edit_source`` and ``edit_header`` change the text first, to show that a fault is caught.
    """

    run: Run = field(default_factory=Run)
    simdgroups: int | None = None
    blocks: int | None = None
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
        plan = launch.plan(request, self.simdgroups, self.blocks)
        return plan.run(self._execute)

    def attention_and_accumulate(
        self, request: AttentionAccumulateRequest
    ) -> tuple[mx.array, mx.array]:
        plan = launch.plan(request.attention, self.simdgroups, self.blocks)
        return self.rows.attention_and_accumulate(request, plan)

    def _execute(self, each: Launch, inputs: list[mx.array]) -> list[mx.array]:
        return self._kernel(each)(inputs, **each.call)

    @property
    def rows(self) -> RowKernels:
        """The operations on rows by their kernels, evaluated at once, on any stream."""
        return RowKernels(lambda stream: self._execute, serves=lambda stream: True)

    def accumulate_scores(self, request: AccumulateRequest) -> mx.array:
        return self.rows.accumulate_scores(request)

    def keep_indices(self, request: RetentionRequest) -> mx.array:
        return self.rows.keep_indices(request)

    def pack_rows(self, *rows: mx.array, **settings: int) -> list[mx.array]:
        """New keys and values by Metal's rule: six arrays."""
        keys, values = self.rows.pack_rows(*rows, **settings)
        return [*keys, *values]

    def encode_rows(self, rows: mx.array, bits: int, seed: int) -> Codes:
        return self.rows.encode_rows(rows, bits, seed)

    def append_quantized(self, *given: Any) -> list[mx.array]:
        return self.rows.append_quantized(*given)

    def quantize_append(self, request: QuantizeAppendRequest) -> tuple[Parts, Parts]:
        return self.rows.quantize_append(request)

    def prefill_scores(self, request: PrefillRequest) -> mx.array:
        return self.rows.prefill_scores(request)

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
        return self._texts(launch.plan(request, self.simdgroups, self.blocks))

    def _texts(self, plan: LaunchPlan) -> list[MetalText]:
        return [self._kernel(each).text(inputs, **each.call) for each, inputs in stand_ins(plan)]

    def _kernel(self, each: Launch) -> EmulatedKernel:
        return metal_kernel(
            each.kernel.name,
            each.kernel.inputs,
            each.kernel.outputs,
            self.edit_source(each.kernel.source),
            self.edit_header(kernels.HEADER),
            ensure_row_contiguous=False,
            run=self.run,
        )


def stand_ins(plan: LaunchPlan) -> list[tuple[Launch, list[mx.array]]]:
    """The launches of a plan with inputs of the right shapes; nothing runs."""
    found: list[tuple[Launch, list[mx.array]]] = []

    def note(each: Launch, inputs: list[mx.array]) -> list[mx.array]:
        found.append((each, inputs))
        outputs = zip(each.output_shapes, each.output_dtypes, strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    plan.outputs(note)
    return found
