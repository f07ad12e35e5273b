"""The native CPU back end: the SIMD kernels of core/, for every valid request on a CPU stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from mlx_h2o.operations import resolved
from mlx_h2o.operations.arguments import NUMBERS, StreamLike, runs_on_gpu
from mlx_h2o.operations.composed import folding
from mlx_h2o.operations.native.module import advice as advice
from mlx_h2o.operations.native.module import required as _module
from mlx_h2o.operations.native.module import unavailable_reason as unavailable_reason
from mlx_h2o.operations.requests import (
    AccumulateRequest,
    AttentionAccumulateRequest,
    AttentionRequest,
    AttentionResult,
    Codes,
    KeyDiversityRequest,
    Packed,
    Parts,
    PrefillRequest,
    QuantizeAppendRequest,
    QuantizedRows,
    RetentionRequest,
    StoredRows,
    TurboRows,
)

name = "native"


def refuses(request: AttentionRequest) -> str:
    """Empty for every request on a CPU stream."""
    return "it runs on CPU streams, found a GPU stream" if runs_on_gpu(request.stream) else ""


def attention(request: AttentionRequest) -> AttentionResult:
    """Attention as ``fast`` documents it."""
    results = iter(_attend(request))
    return AttentionResult(
        next(results),
        next(results) if request.return_scores else None,
        next(results) if request.return_lse else None,
        next(results) if request.return_skipped else None,
    )


def attention_and_accumulate(request: AttentionAccumulateRequest) -> tuple[mx.array, mx.array]:
    """Attention output and the new importance; the scores stay inside."""
    out, importance = _attend(request.attention, request.importance, request.decay)
    return out, importance


def _attend(
    request: AttentionRequest, importance: mx.array | None = None, decay: float | None = None
) -> list[mx.array]:
    """The results of attention; with importance only the output and the new one."""
    keys, values, bits, v_bits, group_size = request.keys, request.values, 8, 8, 64
    if not isinstance(keys, mx.array):
        bits = keys.bits
    if not isinstance(values, mx.array):
        v_bits = values.bits
    for rows in (keys, values):
        if isinstance(rows, QuantizedRows):
            group_size = rows.group_size
    found: list[mx.array] = _module().attention(
        request.queries,
        _parts(keys),
        _parts(values),
        scale=request.scale,
        causal=request.causal,
        mask=request.mask,
        sinks=request.sinks,
        row_bias=request.row_bias,
        importance=importance,
        decay=decay,
        bits=bits,
        v_bits=v_bits,
        group_size=group_size,
        return_scores=request.return_scores and importance is None,
        return_lse=request.return_lse and importance is None,
        return_skipped=request.return_skipped,
        stream=request.stream,
        **{name: getattr(request, name) for name in NUMBERS},
    )
    return found


def _parts(rows: StoredRows | Packed | Codes) -> tuple[mx.array, ...]:
    if isinstance(rows, QuantizedRows | TurboRows):
        return rows.parts
    return rows if isinstance(rows, tuple) else (rows,)


def keep_indices(request: RetentionRequest) -> mx.array:
    """Slots of the rows to keep, uint32 [B, H, N - count], ascending."""
    scores = request.scores
    slots: mx.array = _module().keep_indices(
        scores, request.positions, keep=scores.shape[2] - request.count,
        sink_size=request.sink_size, recent_start=request.recent_start, stream=request.stream,
    )  # fmt: skip
    return slots


def accumulate_scores(request: AccumulateRequest) -> mx.array:
    """The new importance, float32 [B, H, N]."""
    given = request.importance, request.scores
    found = _module().accumulate_scores(*given, decay=request.decay, stream=request.stream)
    return cast(mx.array, found)


def prefill_scores(request: PrefillRequest) -> mx.array:
    """The moving average or the mass of a chunk, float32 [B, Hkv, N]."""
    attention = request.attention
    scores: mx.array = _module().prefill_scores(
        attention.queries,
        attention.keys,
        scale=attention.scale,
        causal=attention.causal,
        mask=attention.mask,
        sinks=attention.sinks,
        row_bias=attention.row_bias,
        decay=request.decay if request.kind == "ema" else None,
        importance=request.importance,
        stream=request.stream,
    )
    return scores


def key_diversity(request: KeyDiversityRequest) -> mx.array:
    """Minus the cosine of each key with the mean normalised key, float32 [B, H, N]."""
    return cast(mx.array, _module().key_diversity(request.keys, stream=request.stream))


def fold(keys: mx.array, values: mx.array, *rows: Any, share: float = 1.0) -> folding.Folded:
    """As ``folding.fold``; keys and values of two dtypes, composed."""
    if keys.dtype != values.dtype:
        definition: Any = folding.fold
        return cast(folding.Folded, definition(keys, values, *rows, share=share))
    return folding.Folded(*_module().fold(keys, values, *rows, share=share))


def quantize_append(request: QuantizeAppendRequest) -> tuple[Parts, Parts]:
    """Keys and values as ``fast`` documents them, in the memory of the inputs where it is free."""
    count = len(request.keys)
    found = _module().quantize_append(
        request.keys,
        request.values,
        request.new_keys,
        request.new_values,
        request.slots,
        bits=request.bits,
        group_size=request.group_size,
        v_bits=request.v_bits,
        stream=request.stream,
    )
    return tuple(found[:count]), tuple(found[count:])


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


_AS_DEFINED = {
    "append_quantized", "append_rows", "commits_pages", "committed_bytes", "decode_rows",
    "discard_rows", "encode_rows", "merge_segments", "put_rows", "reserved_rows",
    "segment_rows",
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
        self._accumulating = _module().attention_and_accumulate

    # Every option by its name: a dict of them would cost more than the rest of the call.

    def attention(
        self,
        queries: mx.array,
        keys: resolved.Rows,
        values: resolved.Rows,
        *,
        scale: float,
        causal: bool = False,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
        row_bias: mx.array | None = None,
        bits: int = 8,
        group_size: int = 64,
        v_bits: int = 8,
        sparse_v_threshold: float = 0.0,
        return_scores: bool = False,
        return_lse: bool = False,
        stream: StreamLike = None,
    ) -> AttentionResult:
        found = _module().attention(
            queries,
            keys if isinstance(keys, tuple) else (keys,),
            values if isinstance(values, tuple) else (values,),
            scale=scale, causal=causal, mask=mask, sinks=sinks,
            sparse_v_threshold=sparse_v_threshold, bits=bits, v_bits=v_bits,
            group_size=group_size, return_scores=return_scores, return_lse=return_lse,
            row_bias=row_bias, stream=stream,
        )  # fmt: skip
        scores = found[1] if return_scores else None
        return AttentionResult(found[0], scores, found[-1] if return_lse else None)

    def attention_and_accumulate(
        self,
        queries: mx.array,
        keys: resolved.Rows,
        values: resolved.Rows,
        importance: mx.array,
        *,
        scale: float,
        decay: float | None,
        causal: bool = False,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
        row_bias: mx.array | None = None,
        bits: int = 8,
        group_size: int = 64,
        v_bits: int = 8,
        sparse_v_threshold: float = 0.0,
    ) -> tuple[mx.array, mx.array]:
        if row_bias is None and isinstance(keys, mx.array) and isinstance(values, mx.array):
            out, updated = self._accumulating(
                queries, keys, values, importance, scale=scale, decay=decay, causal=causal,
                mask=mask, sinks=sinks,
            )  # fmt: skip
            return out, updated
        out, updated = _module().attention(
            queries, _parts(keys), _parts(values), scale=scale, causal=causal, mask=mask,
            sinks=sinks, row_bias=row_bias, importance=importance, decay=decay,
            sparse_v_threshold=sparse_v_threshold, bits=bits, v_bits=v_bits,
            group_size=group_size,
        )  # fmt: skip
        return out, updated
