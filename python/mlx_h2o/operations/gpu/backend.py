"""The base of back ends that run the operations as kernels."""

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx

from mlx_h2o.operations import composed
from mlx_h2o.operations.arguments import runs_on_gpu
from mlx_h2o.operations.composed import buffers, turbo
from mlx_h2o.operations.gpu import kernels, launch, launches, mlx_attention
from mlx_h2o.operations.gpu.launches import Launch, LaunchPlan
from mlx_h2o.operations.requests import AttentionRequest, AttentionResult, attention_request
from mlx_h2o.operations.resolved import Operations

_MOST_KINDS = 1024  # of calls whose launches are remembered


class KernelBackend(Operations):
    """A back end that runs the packaged kernels, compiled by the function of ``mx.fast`` of its
    name. On streams that it does not serve, operations on rows are composed."""

    def __init__(self) -> None:
        self._measured: dict[tuple[object, ...], bool] = {}
        self._known: dict[tuple[object, ...], LaunchPlan] = {}

    def execute(self, each: Launch, inputs: list[mx.array]) -> list[mx.array]:
        """The outputs of one launch."""
        kernel = kernels.compiled(self.name, each.kernel, self.header, each.threadgroup[0])
        return kernel(
            inputs=inputs, template=each.template, grid=each.grid, threadgroup=each.threadgroup,
            output_shapes=each.output_shapes, output_dtypes=each.output_dtypes,
        )  # fmt: skip

    def header(self, threads: int) -> str:
        """The text before a kernel that runs with ``threads`` threads per threadgroup."""
        return kernels.HEADER

    def serves(self) -> bool:
        """Whether kernels run where a call would run."""
        return runs_on_gpu()

    def plan(self, request: AttentionRequest) -> LaunchPlan:
        """The launches for a request that was not refused: the same in all layers, and at a full
        budget in all steps."""
        kind = launch.kind_of(request)
        known = self._known.get(kind)
        if known is None:
            passes = self.passes(request, kind[0])
            known = self._remember(kind, LaunchPlan(passes, launch.constants(request)))
        return LaunchPlan(known.passes, {**launch.buffers(request), **known.given})

    def passes(self, request: AttentionRequest, text: tuple[object, ...]) -> tuple[Launch, ...]:
        """The launches for the first request of a kind; ``text`` is what their text depends on."""
        return launch.passes(request)

    def _remember(self, kind: tuple[object, ...], plan: LaunchPlan) -> LaunchPlan:
        if len(self._known) >= _MOST_KINDS:
            self._known.clear()
        self._known[kind] = plan
        return plan

    def refuses(self, request: AttentionRequest) -> str:
        if not self.serves():
            return f"{self.name} kernels run on GPU streams, found a CPU stream"
        by_mlx = mlx_attention.is_chunk(request) and mlx_attention.serves(request)
        return "" if by_mlx else launch.refuses(request)

    def uses_mlx(self, request: AttentionRequest) -> bool:
        """Whether MLX's own attention is used: always for a chunk; for fewer queries if it was
        faster on this machine, measured once per shape."""
        if not mlx_attention.serves(request):
            return False
        if mlx_attention.is_chunk(request):
            return True
        if (shape := mlx_attention.shape_of(request)) not in self._measured:
            self._measured[shape] = mlx_attention.is_faster(request, self._by_kernels)
        return self._measured[shape]

    def attend(self, request: AttentionRequest) -> AttentionResult:
        return (mlx_attention.attention if self.uses_mlx(request) else self._by_kernels)(request)

    def _by_kernels(self, request: AttentionRequest) -> AttentionResult:
        made = self._attended(request, self.plan(request))
        if not request.return_scores:
            made.pop("scores", None)  # only for the second sweep, over the values
        if request.return_skipped and "skipped" not in made:
            made["skipped"] = mx.zeros(request.queries.shape[:3])
        return AttentionResult(made["out"], *map(made.get, AttentionResult._fields[1:]))

    def _attended(self, request: AttentionRequest, plan: LaunchPlan) -> dict[str, mx.array]:
        """All outputs of the launches; that of attention is rotated back from the codes' basis."""
        made = self.outputs(*plan)
        if request.has_codes:
            made["out"] = turbo.output(request, made["out"])
        return made

    def attention_and_accumulate(
        self, *rows: Any, decay: float | None, **options: Any
    ) -> tuple[mx.array, mx.array]:
        """For arrays and the mass, a step like an earlier one makes no request: launches depend on
        shapes and dtypes, and the number of rows only changes the size of the scores."""
        if decay is not None or "bits" in options or not self.serves():
            return super().attention_and_accumulate(*rows, decay=decay, **options)
        queries, keys, values, importance = rows
        shape, (*heads, count, size) = queries.shape, keys.shape
        mask, sinks, bias = map(options.get, ("mask", "sinks", "row_bias"))
        # The number of blocks depends only on the bit length of ``count``.
        kind = (
            options["scale"], options.get("causal"), shape, *heads, size, values.shape[3],
            count.bit_length(), importance.shape, queries.dtype, mask is None or mask.dtype,
            sinks is None or sinks.dtype, bias is None,
        )  # fmt: skip
        known = self._known.get(kind)
        if known is None:
            request = attention_request(*rows[:3], **options, bias_masks=False, return_lse=True)
            if self.refuses(request):
                return super().attention_and_accumulate(*rows, decay=decay, **options)
            passes, _ = launches.add_mass(self.plan(request), importance)
            known = self._remember(kind, LaunchPlan(passes, launch.constants(request)))
        given = {
            "queries": queries, "keys": keys, "values": values, "importance": importance,
            "sinks": sinks, "row_bias": bias, **known.given,
        }  # fmt: skip
        if mask is not None:
            given["mask"] = mx.broadcast_to(mask, (*shape[:3], count))
        made = self.outputs(launches.over(known.passes, count), given)
        return mx.depends(made["out"], [made["accumulated"]]), made["accumulated"]

    def accumulate(
        self, request: AttentionRequest, importance: mx.array, decay: float | None
    ) -> tuple[mx.array, mx.array]:
        """Attention, then the mass of its weights in one kernel, or the moving average of its
        scores, composed."""
        if decay is not None:
            return super().accumulate(request, importance, decay)
        request.return_lse = True
        made = self._attended(request, launches.add_mass(self.plan(request), importance))
        return mx.depends(made["out"], [made["accumulated"]]), made["accumulated"]

    def keep_indices(
        self, scores: mx.array, positions: mx.array, *, keep: int, **zones: Any
    ) -> mx.array:
        """The rows to keep, by partial selection in one kernel; composed if all are kept."""
        if keep == scores.shape[2] or not self.serves():
            return composed.keep_indices(scores, positions, keep=keep, **zones)
        return self.outputs(*launches.keep_rows(scores, positions, keep, **zones))["kept"]

    def encode_rows(self, rows: mx.array, bits: int, seed: int) -> tuple[mx.array, mx.array]:
        """Codes of rows [B, H, L, D], and their norms, in one kernel."""
        if not self.serves():
            return turbo.encode_rows(rows, bits, seed)
        made = self.outputs(*launches.encode_rows(rows, bits, seed))
        return made["words"], made["norms"]

    def quantize_append(self, *given: Any, **more: Any) -> list[mx.array]:
        return buffers.quantize_append(*given, encode=self.encode_rows, **more)

    def outputs(
        self, passes: Iterable[Launch], given: Mapping[str, mx.array | None]
    ) -> dict[str, mx.array]:
        """The buffers given to the launches of a plan and their outputs, by name."""
        there: dict[str, Any] = {**given}
        for each in passes:
            made = self.execute(each, [*map(there.__getitem__, each.kernel.inputs)])
            there |= zip(each.kernel.outputs, made, strict=True)
        return there
