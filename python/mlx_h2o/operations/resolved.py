"""The operations as some back ends serve them, for arguments that are known to be right.

``backends.resolve`` hands them out. Our caches call them; the functions of ``fast`` check what a
user passed, and serve the request they made of it by the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar, cast

import mlx.core as mx

from mlx_h2o.operations import composed
from mlx_h2o.operations.arguments import StreamLike
from mlx_h2o.operations.composed import buffers, compaction, turbo
from mlx_h2o.operations.composed import rows as composed_cache
from mlx_h2o.operations.composed import segments as composed_segments
from mlx_h2o.operations.requests import (
    MASK_THRESHOLDS,
    AccumulateRequest,
    AttentionAccumulateRequest,
    AttentionRequest,
    AttentionResult,
    Codes,
    KeyDiversityRequest,
    Packed,
    PerSequence,
    RetentionRequest,
    stored_rows,
)

if TYPE_CHECKING:
    from typing import Required

    from typing_extensions import Unpack

Function = TypeVar("Function", bound=Callable[..., Any])
Rows = mx.array | Packed | Codes


class Backend(Protocol):
    """What the dispatch asks of a back end; it may have more."""

    @property
    def name(self) -> str: ...

    def unavailable_reason(self) -> str: ...

    def refuses(self, request: AttentionRequest) -> str: ...

    def attention(self, request: AttentionRequest) -> AttentionResult: ...


class RowOptions(TypedDict, total=False):
    """What attention over rows may be told; in ``fast`` each of them is explained.

    ``mask`` is an array that broadcasts to [B, Hq, Lq, N], and excludes ``causal``.
    """

    scale: Required[float]
    causal: bool
    mask: mx.array | None
    sinks: mx.array | None
    row_bias: mx.array | None
    bits: int
    group_size: int
    v_bits: int
    sparse_v_threshold: float


class AttentionOptions(RowOptions, total=False):
    """And what it may be asked for."""

    return_scores: bool
    return_lse: bool
    stream: StreamLike


class Operations:
    """What ``candidates`` serve, the preferred first; ``named``, if one of them was asked for.

    Arguments are those of ``fast``, and nobody checks them. ``keys`` and ``values`` are arrays, or
    tuples of words, scales and biases, or of words and norms, with ``bits``, ``v_bits`` and
    ``group_size``. A ``row_bias`` masks no row. Numbers per sequence are an int, or int32 [] or
    [B].
    """

    def __init__(self, named: str | None, candidates: Sequence[Backend]) -> None:
        self._named = named
        self._candidates = tuple(candidates)
        self.name = candidates[0].name
        # What a back end may take over whole, so that a step costs no call in between.
        self.output: Callable[..., mx.array] = self._output
        """Attention over arrays without scores, of the arguments of ``attention``."""
        self.append_rows = self.function(buffers.append_rows)
        self.append_quantized = self.function(buffers.append_quantized)
        self.put_rows = self.function(buffers.put_rows)
        self.compact_rows = self.function(compaction.compact_rows)
        self.merge_segments = self.function(composed_segments.merge_segments)
        self.segment_rows = self.function(composed_segments.segment_rows)
        self.encode_rows = self.function(turbo.encode_rows)
        self.decode_rows = self.function(turbo.decode_rows)
        self.reserved_rows = self.function(buffers.reserved_rows)
        self.discard_rows = self.function(buffers.discard_rows)
        self.commits_pages = self.function(buffers.commits_pages)
        self.committed_bytes = self.function(buffers.committed_bytes)

    def backend_for(self, request: AttentionRequest, op: str) -> Backend:
        """Who serves this attention. Raises ValueError where one was named and it cannot."""
        for backend in self._candidates:
            reason = backend.refuses(request)
            if not reason:
                return backend
            if self._named is not None:
                raise ValueError(
                    f"[{op}] back end {self._named!r} cannot serve this call: {reason}"
                )
        raise AssertionError("composed refused a valid request")

    def function(self, definition: Function) -> Function:
        """The function of a back end that has the name of this definition, else the definition."""
        for backend in self._candidates:
            found = getattr(backend, definition.__name__, None)
            if found is not None:
                return cast(Function, found)
        return definition

    def serve_attention(self, request: AttentionRequest, op: str = "attention") -> AttentionResult:
        return self.backend_for(request, op).attention(request)

    def serve_accumulating(self, request: AttentionAccumulateRequest) -> tuple[mx.array, mx.array]:
        """``attention_and_accumulate``, in one operation where a back end has it."""
        attention, op = request.attention, "attention_and_accumulate"
        attention.return_lse = request.decay is None
        backend = self.backend_for(attention, op)
        fused = getattr(backend, op, None)
        if fused is not None:
            return cast("tuple[mx.array, mx.array]", fused(request))
        return composed_cache.attention_and_accumulate(request, backend.attention)

    def attention(
        self, queries: mx.array, keys: Rows, values: Rows, **options: Unpack[AttentionOptions]
    ) -> AttentionResult:
        """Out; and where asked for scores and lse."""
        return self.serve_attention(_attention_request(queries, keys, values, **options))

    def attention_and_accumulate(
        self,
        queries: mx.array,
        keys: Rows,
        values: Rows,
        importance: mx.array,
        *,
        decay: float | None,
        **options: Unpack[RowOptions],
    ) -> tuple[mx.array, mx.array]:
        """Out and the new importance; the mass where ``decay`` is None."""
        attention = _attention_request(queries, keys, values, True, **options)
        return self.serve_accumulating(AttentionAccumulateRequest(attention, importance, decay))

    def _output(self, *rows: mx.array, **options: Unpack[AttentionOptions]) -> mx.array:
        return self.attention(rows[0], rows[1], rows[2], **options).out

    def accumulate_scores(
        self, importance: mx.array, scores: mx.array, *, decay: float, masked: bool
    ) -> mx.array:
        request = AccumulateRequest(importance, scores, decay, masked)
        return self.function(composed_cache.accumulate_scores)(request)

    def keep_indices(
        self,
        scores: mx.array,
        positions: mx.array,
        *,
        keep: int,
        sink_size: int = 0,
        recent_start: PerSequence | None = None,
    ) -> mx.array:
        count = scores.shape[2] - keep
        request = RetentionRequest(scores, positions, count, sink_size, recent_start)
        return self.function(composed.keep_indices)(request)

    def key_diversity(self, keys: mx.array) -> mx.array:
        return self.function(composed_cache.key_diversity)(KeyDiversityRequest(keys))


def _attention_request(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    return_scores: bool = False,
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
    return_lse: bool = False,
    stream: StreamLike = None,
) -> AttentionRequest:
    stored = stored_rows(keys, bits, group_size)
    threshold = 0.0
    if mask is not None:
        threshold = MASK_THRESHOLDS.get(mask.dtype, 0.0)
        mask = mx.broadcast_to(mask, (*queries.shape[:3], stored.shape[2]), stream=stream)
    return AttentionRequest(
        queries, stored, stored_rows(values, v_bits, group_size), scale, causal, mask, sinks,
        threshold, sparse_v_threshold, return_scores, return_lse, False, stream, row_bias, False,
    )  # fmt: skip
