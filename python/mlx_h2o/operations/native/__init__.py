"""The native CPU back end: the SIMD kernels of core/, for every valid request on a CPU stream."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from mlx_h2o.operations import resolved
from mlx_h2o.operations.arguments import NUMBERS, StreamLike, runs_on_gpu
from mlx_h2o.operations.composed import folding
from mlx_h2o.operations.native.module import advice as advice
from mlx_h2o.operations.native.module import required as _module
from mlx_h2o.operations.native.module import unavailable_reason as unavailable_reason
from mlx_h2o.operations.requests import AttentionRequest, AttentionResult, PackedRows

name = "native"

_OF_SCORES = "queries", "keys", "scale", "causal", "mask", "sinks", "row_bias", "stream"
_OF_ATTENTION = *_OF_SCORES, "values", *NUMBERS
_ASKED = "return_scores", "return_lse", "return_skipped"


def refuses(request: AttentionRequest) -> str:
    """Empty for every request on a CPU stream."""
    return "it runs on CPU streams, found a GPU stream" if runs_on_gpu(request.stream) else ""


def _given(request: AttentionRequest, names: Sequence[str]) -> dict[str, Any]:
    """These fields of a request, as the extension takes them."""
    found = {name: getattr(request, name) for name in names}
    parts = {name: rows.parts for name, rows in found.items() if isinstance(rows, PackedRows)}
    return found | parts


def attention(request: AttentionRequest) -> AttentionResult:
    """Attention as ``fast`` documents it."""
    given = _given(request, (*_OF_ATTENTION, *_ASKED))
    return AttentionResult(*_module().attention(**given, **request.packing))


def attention_and_accumulate(
    request: AttentionRequest, importance: mx.array, decay: float | None
) -> tuple[mx.array, mx.array]:
    """Attention output and the new importance; the scores stay inside."""
    found = _module().attention_and_accumulate(
        **_given(request, _OF_ATTENTION), **request.packing, importance=importance, decay=decay
    )
    return cast("tuple[mx.array, mx.array]", found)


def prefill_scores(
    request: AttentionRequest, importance: mx.array | None, decay: float | None
) -> mx.array:
    """The moving average or the mass of a chunk, float32 [B, Hkv, N]."""
    given = _given(request, _OF_SCORES)
    return cast(mx.array, _module().prefill_scores(**given, importance=importance, decay=decay))


def fold(keys: mx.array, values: mx.array, *rows: Any, share: float = 1.0) -> folding.Folded:
    """As ``folding.fold``; keys and values of two dtypes, composed."""
    if keys.dtype != values.dtype:
        definition: Any = folding.fold
        return cast(folding.Folded, definition(keys, values, *rows, share=share))
    return folding.Folded(*_module().fold(keys, values, *rows, share=share))


def compact_rows(
    buffers: Sequence[mx.array],
    kept: mx.array,
    lines: Sequence[int],
    start: int = 0,
    tail: int = 0,
    stream: StreamLike = None,
) -> list[mx.array]:
    """The buffers, in the memory of the inputs where that is free.

    One at a time: MLX holds all outputs of an operation until it has run, and what is appended to
    them in the same evaluation would copy them.
    """
    one = _module().compact_rows
    where = [*lines]
    return [one(each, kept, where, start, tail, stream=stream) for each in buffers]


def put_each(buffers: list[mx.array], slots: mx.array, rows: list[mx.array]) -> list[mx.array]:
    """As ``buffers.put_each``."""
    slots = mx.broadcast_to(slots.squeeze(3).astype(mx.uint32), rows[0].shape[:3])
    return [*map(_module().put_rows, buffers, itertools.repeat(slots), rows)]


_AS_DEFINED = {
    "accumulate_scores", "append_quantized", "append_rows", "commits_pages", "committed_bytes",
    "decode_rows", "discard_rows", "encode_rows", "keep_indices", "key_diversity", "merge_segments",
    "put_rows", "quantize_append", "reserved_rows", "segment_rows",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """The extension's own function, where it takes and returns what the definition does."""
    if name in _AS_DEFINED:
        return getattr(_module(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Operations(resolved.Operations):
    """What a decode step asks for goes to the extension as it comes, without a request."""

    def __init__(self, named: str | None, candidates: Sequence[resolved.Backend]) -> None:
        super().__init__(named, candidates)
        self.output = _module().scaled_dot_product_attention
        self.attention = _module().attention
        self.attention_and_accumulate = _module().attention_and_accumulate
