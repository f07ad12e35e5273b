"""The operations on a cache's rows by kernels, for every machine that runs them.

A back end makes one ``RowKernels`` of its way to run a launch, and names its functions as its own.
"""

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from mlx_h2o.operations import composed
from mlx_h2o.operations.arguments import StreamLike, runs_on_gpu
from mlx_h2o.operations.composed import buffers, turbo
from mlx_h2o.operations.composed import prefill as composed_prefill
from mlx_h2o.operations.composed import rows as composed_cache
from mlx_h2o.operations.composed.placement import placed
from mlx_h2o.operations.gpu import launch_prefill, launch_rows
from mlx_h2o.operations.gpu.launches import Execute, LaunchPlan
from mlx_h2o.operations.requests import (
    AccumulateRequest,
    AttentionAccumulateRequest,
    Codes,
    Packed,
    Parts,
    PrefillRequest,
    QuantizeAppendRequest,
    RetentionRequest,
)


class RowKernels:
    """``executor`` gives the function that runs a launch on a stream.

    On a stream that ``serves`` is False of, the compositions run.
    """

    def __init__(
        self,
        executor: Callable[[StreamLike], Execute],
        serves: Callable[[StreamLike], bool] = runs_on_gpu,
    ) -> None:
        self._executor = executor
        self._serves = serves
        # What a cache asks for in a step: the definition, but for the codes.
        self.append_quantized = partial(buffers.append_quantized, encode=self.encode_rows)

    def attention_and_accumulate(
        self, request: AttentionAccumulateRequest, attention: LaunchPlan
    ) -> tuple[mx.array, mx.array]:
        """Attention, and the moving average of its scores or the mass of its weights."""
        execute = self._executor(request.attention.stream)
        found = attention.outputs(execute)
        if request.decay is None:
            with placed(request.attention.stream):
                scores, (batch, heads) = found["scores"], request.importance.shape[:2]
                weights = composed.weights_of(scores, found["lse"])
                weights = weights.reshape(batch, heads, -1, scores.shape[3])
                mass = composed_cache.add_mass(request.importance, weights)
                return mx.depends(found["out"], [mass]), mass
        plan = launch_rows.accumulate_scores(
            AccumulateRequest(request.importance, found["scores"], request.decay)
        )
        (launch,) = plan.passes
        (importance,) = execute(launch, launch.inputs(plan.given))
        with placed(request.attention.stream):
            return mx.depends(found["out"], [importance]), importance

    def accumulate_scores(self, request: AccumulateRequest) -> mx.array:
        """The moving average in one kernel."""
        if not self._serves(request.stream):
            return composed_cache.accumulate_scores(request)
        return self._launched(launch_rows.accumulate_scores(request), request.stream)[0]

    def keep_indices(self, request: RetentionRequest) -> mx.array:
        """The rows that stay, by partial selection in one kernel; all of them, composed."""
        if request.count == 0 or not self._serves(request.stream):
            return composed.keep_indices(request)
        return self._launched(launch_rows.keep_rows(request), request.stream)[0]

    def pack_rows(
        self,
        new_keys: mx.array,
        new_values: mx.array,
        *,
        bits: int,
        v_bits: int,
        group_size: int,
        stream: StreamLike = None,
    ) -> tuple[Packed, Packed]:
        """New keys and values, quantised in one kernel."""
        packing = launch_rows.pack_rows(
            new_keys, new_values, bits=bits, v_bits=v_bits, group_size=group_size
        )
        kw, ks, kb, vw, vs, vb = self._launched(packing, stream)
        return (kw, ks, kb), (vw, vs, vb)

    def encode_rows(self, rows: mx.array, bits: int, seed: int, stream: StreamLike = None) -> Codes:
        """Codes of rows [B, H, L, D], and their norms, in one kernel."""
        if not self._serves(stream):
            return turbo.encode_rows(rows, bits, seed)
        words, norms = self._launched(launch_rows.encode_rows(rows, bits, seed), stream)
        return words, norms

    def quantize_append(self, request: QuantizeAppendRequest) -> tuple[Parts, Parts]:
        """New rows packed by the kernels, written into their slots by a scatter of each part."""
        if not self._serves(request.stream):
            return composed_cache.quantize_append(request)
        if len(request.keys) == len(request.values) == 3:
            return composed_cache.appended(request, *self._packed(request))
        encode = partial(self.encode_rows, stream=request.stream)
        return composed_cache.quantize_append(request, encode)

    def _packed(self, request: QuantizeAppendRequest) -> tuple[Packed, Packed]:
        return self.pack_rows(
            request.new_keys,
            request.new_values,
            bits=request.bits,
            v_bits=request.v_bits,
            group_size=request.group_size,
            stream=request.stream,
        )

    def prefill_scores(self, request: PrefillRequest) -> mx.array:
        """The scores of a chunk in one kernel, its mass in two; other head sizes, composed."""
        if launch_prefill.refuses(request) or not self._serves(request.stream):
            return composed_prefill.prefill_scores(request)
        plan = launch_prefill.plan(request)
        return plan.outputs(self._executor(request.stream))["accumulated"]

    def _launched(self, plan: LaunchPlan, stream: StreamLike) -> list[mx.array]:
        return [*plan.outputs(self._executor(stream)).values()]
