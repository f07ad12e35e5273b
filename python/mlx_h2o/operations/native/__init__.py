"""The native CPU back end: the SIMD kernels of core/, for every valid request on a CPU stream."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from mlx_h2o.operations.arguments import NUMBERS, runs_on_gpu
from mlx_h2o.operations.composed import folding
from mlx_h2o.operations.native import module
from mlx_h2o.operations.requests import AttentionRequest, AttentionResult
from mlx_h2o.operations.resolved import Operations

_OF_SCORES = "queries", "keys", "scale", "causal", "mask", "sinks", "row_bias"
_OF_ATTENTION = *_OF_SCORES, "values", "bits", "group_size", "v_bits", *NUMBERS
_WITH_RESULTS = *_OF_ATTENTION, "return_scores", "return_lse", "return_skipped"


class Native(Operations):
    """The extension's functions."""

    name = "native"
    unavailable_reason = staticmethod(module.unavailable_reason)
    advice = staticmethod(module.advice)

    def ready(self) -> None:
        """Bind functions of the extension as methods, so that a step calls them directly: those
        with the names of the base class, and its signatures if this class has none of its own."""
        self._core = core = cast(Any, module.extension()[0])
        as_defined = vars(Operations).keys() & vars(core).keys() - vars(Native).keys()
        vars(self).update({name: vars(core)[name] for name in as_defined})
        vars(self)["attention_and_accumulate"] = core.attention
        vars(self)["output"] = core.scaled_dot_product_attention

    def refuses(self, request: AttentionRequest) -> str:
        return "it runs on CPU streams, found a GPU stream" if runs_on_gpu() else ""

    def attend(self, request: AttentionRequest) -> AttentionResult:
        return AttentionResult(*self._core.attention(**_given(request, _WITH_RESULTS)))

    def accumulate(
        self, request: AttentionRequest, importance: mx.array, decay: float | None
    ) -> tuple[mx.array, mx.array]:
        """Attention output and the new importance; the scores stay inside."""
        given = _given(request, _OF_ATTENTION)
        found = self._core.attention(importance=importance, decay=decay, **given)
        return cast("tuple[mx.array, mx.array]", found)

    def prefill_scores(
        self, request: AttentionRequest, importance: mx.array | None, decay: float | None
    ) -> mx.array:
        given = _given(request, _OF_SCORES) | {"importance": importance, "decay": decay}
        return cast(mx.array, self._core.prefill_scores(**given))

    def fold(self, keys: mx.array, values: mx.array, *rows: Any, **share: Any) -> folding.Folded:
        """As ``folding.fold``, which also serves keys and values of different dtypes."""
        if keys.dtype != values.dtype:
            return folding.fold(keys, values, *rows, **share)
        return folding.Folded(*self._core.fold(keys, values, *rows, **share))

    def compact_rows(
        self, buffers: Sequence[mx.array], kept: mx.array, sequences: Sequence[int], *tail: int
    ) -> list[mx.array]:
        """The buffers, in the memory of the inputs if nothing else holds it.

        One operation for each: MLX holds all outputs of an operation until it has run, so appending
        to them in the same evaluation would copy them.
        """
        one, where = self._core.compact_rows, [*sequences]
        return [one(each, kept, where, *tail) for each in buffers]

    def put_each(
        self, buffers: list[mx.array], slots: mx.array, rows: list[mx.array]
    ) -> list[mx.array]:
        slots = mx.broadcast_to(slots.squeeze(3).astype(mx.uint32), rows[0].shape[:3])
        return [*map(self._core.put_rows, buffers, [slots] * len(rows), rows)]


def _given(request: AttentionRequest, names: Sequence[str]) -> dict[str, Any]:
    """Some fields of a request, which the extension takes as they are."""
    return {name: getattr(request, name) for name in names}


BACKEND = Native()
