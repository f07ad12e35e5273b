"""The operations as some back ends serve them, for arguments that are known to be right.

``backends.resolve`` hands them out. Our caches call them; the functions of ``fast`` check what a
user passed, and serve the request they made of it by the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from mlx_h2o.operations import (
    compaction,
    composed,
    composed_cache,
    composed_prefill,
    composed_segments,
)
from mlx_h2o.operations.arguments import StreamLike
from mlx_h2o.operations.placement import placed
from mlx_h2o.operations.requests import (
    AccumulateRequest,
    AttentionAccumulateRequest,
    AttentionRequest,
    AttentionResult,
    KeyDiversityRequest,
    Packed,
    PerSequence,
    PrefillRequest,
    QuantizeAppendRequest,
    QuantizedRows,
    RetentionRequest,
)
from mlx_h2o.operations.validate import MASK_THRESHOLDS

if TYPE_CHECKING:
    from mlx_h2o.operations.backends import Backend

_DEFINITIONS: dict[str, Callable[..., Any]] = {
    "keep_indices": composed.keep_indices,
    "evict_indices": composed.evict_indices,
    "accumulate_scores": composed_cache.accumulate_scores,
    "key_diversity": composed_cache.key_diversity,
    "replace_worst": composed_cache.replace_worst,
    "quantize_append": composed_cache.quantize_append,
    "prefill_scores": composed_prefill.prefill_scores,
    "compact_rows": compaction.compact_rows,
    "merge_segments": composed_segments.merge_segments,
    "segment_rows": composed_segments.segment_rows,
}


class Operations:
    """What ``candidates`` serve, the preferred first; ``named``, if one of them was asked for.

    Arguments are those of ``fast``, and nobody checks them. ``keys`` and ``values`` are arrays, or
    both tuples of words, scales and biases with ``bits``, ``v_bits`` and ``group_size``; ``mask``
    is an array that broadcasts to [B, Hq, Lq, N]. Numbers per sequence are an int, or int32 [] or
    [B].
    """

    importance_may_have_room = False
    """Whether ``attention_and_accumulate`` takes importance of more rows than there are keys,
    in place: the others stay as they are."""

    def __init__(self, named: str | None, candidates: Sequence[Backend]) -> None:
        self._named = named
        self._candidates = tuple(candidates)
        self.name = candidates[0].name

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

    def function(self, op: str) -> Callable[..., Any]:
        """What serves the requests of an operation other than attention."""
        for backend in self._candidates:
            found = getattr(backend, op, None)
            if found is not None:
                return cast(Callable[..., Any], found)
        return _DEFINITIONS[op]

    def serve_attention(self, request: AttentionRequest, op: str = "attention") -> AttentionResult:
        return self.backend_for(request, op).attention(request)

    def serve_accumulating(self, request: AttentionAccumulateRequest) -> tuple[mx.array, mx.array]:
        """``attention_and_accumulate``, in one operation where a back end has it."""
        attention, op = request.attention, "attention_and_accumulate"
        backend = self.backend_for(attention, op)
        fused = getattr(backend, op, None)
        if fused is not None:
            return cast("tuple[mx.array, mx.array]", fused(request))
        found = backend.attention(attention)
        assert found.scores is not None
        importance = self.function("accumulate_scores")(
            AccumulateRequest(
                request.importance, found.scores, request.decay, attention.hides, attention.stream
            )
        )
        # Untied, the scores of every step would wait for someone to ask, graph and all.
        with placed(attention.stream):
            return mx.depends(found.out, [importance]), importance

    def attention(
        self,
        queries: mx.array,
        keys: mx.array | Packed,
        values: mx.array | Packed,
        *,
        scale: float,
        causal: bool = False,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
        probes: mx.array | None = None,
        bits: int = 8,
        group_size: int = 64,
        v_bits: int = 8,
        sparse_v_threshold: float = 0.0,
        return_scores: bool = False,
        return_lse: bool = False,
        stream: StreamLike = None,
    ) -> AttentionResult:
        """Out; and where asked for scores, lse and the scores of the probes."""
        return self.serve_attention(
            attention_request(
                queries, keys, values, scale, causal, mask, sinks, probes, (bits, v_bits),
                group_size, sparse_v_threshold, return_scores, return_lse, stream,
            )
        )  # fmt: skip

    def attention_and_accumulate(
        self,
        queries: mx.array,
        keys: mx.array | Packed,
        values: mx.array | Packed,
        importance: mx.array,
        *,
        scale: float,
        decay: float,
        causal: bool = False,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
        bits: int = 8,
        group_size: int = 64,
        v_bits: int = 8,
        sparse_v_threshold: float = 0.0,
        stream: StreamLike = None,
    ) -> tuple[mx.array, mx.array]:
        """Out and the new importance."""
        attention = attention_request(
            queries, keys, values, scale, causal, mask, sinks, None, (bits, v_bits),
            group_size, sparse_v_threshold, True, False, stream,
        )  # fmt: skip
        return self.serve_accumulating(AttentionAccumulateRequest(attention, importance, decay))

    def accumulate_scores(
        self,
        importance: mx.array,
        scores: mx.array,
        *,
        decay: float,
        masked: bool = True,
        stream: StreamLike = None,
    ) -> mx.array:
        request = AccumulateRequest(importance, scores, decay, masked, stream)
        return cast(mx.array, self.function("accumulate_scores")(request))

    def prefill_scores(
        self,
        queries: mx.array,
        keys: mx.array,
        *,
        scale: float,
        causal: bool = False,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
        decay: float | None = None,
        importance: mx.array | None = None,
        stream: StreamLike = None,
    ) -> mx.array:
        """Of all queries given: the moving average with ``decay``, else the mass."""
        attention = attention_request(
            queries, keys, keys, scale, causal, mask, sinks, None, (8, 8), 64, 0.0, True, False,
            stream,
        )  # fmt: skip
        request = PrefillRequest(
            attention, "mass" if decay is None else "ema", importance, decay or 0.0
        )
        return cast(mx.array, self.function("prefill_scores")(request))

    def keep_indices(
        self,
        scores: mx.array,
        positions: mx.array,
        *,
        keep: int,
        sink_size: int = 0,
        recent_start: PerSequence | None = None,
        stream: StreamLike = None,
    ) -> mx.array:
        count = scores.shape[2] - keep
        request = RetentionRequest(scores, positions, count, sink_size, recent_start, stream)
        return cast(mx.array, self.function("keep_indices")(request))

    def evict_indices(
        self,
        scores: mx.array,
        positions: mx.array,
        *,
        count: int = 1,
        sink_size: int = 0,
        recent_start: PerSequence | None = None,
        stream: StreamLike = None,
    ) -> mx.array:
        request = RetentionRequest(scores, positions, count, sink_size, recent_start, stream)
        return cast(mx.array, self.function("evict_indices")(request))

    def key_diversity(self, keys: mx.array, *, stream: StreamLike = None) -> mx.array:
        return cast(mx.array, self.function("key_diversity")(KeyDiversityRequest(keys, stream)))

    def quantize_append(
        self,
        keys: Packed,
        values: Packed,
        new_keys: mx.array,
        new_values: mx.array,
        slots: mx.array,
        *,
        bits: int,
        group_size: int,
        v_bits: int,
        stream: StreamLike = None,
    ) -> tuple[Packed, Packed]:
        request = QuantizeAppendRequest(
            keys, values, new_keys, new_values, slots, bits, group_size, v_bits, stream
        )
        return cast("tuple[Packed, Packed]", self.function("quantize_append")(request))

    def append_rows(
        self, buffers: list[mx.array], rows: list[mx.array], start: int
    ) -> list[mx.array]:
        """New rows [B, H, L, width] from slot ``start`` on: the buffers, written in place where
        nothing else holds them, and then the first ``start + L`` slots of each."""
        end = start + rows[0].shape[2]
        for buffer, new in zip(buffers, rows, strict=True):
            buffer[:, :, start:end] = new
        return [*buffers, *(buffer[:, :, :end] for buffer in buffers)]

    def output(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        causal: bool = False,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention over arrays without scores."""
        found = self.attention(
            queries, keys, values, scale=scale, causal=causal, mask=mask, sinks=sinks
        )
        return found.out

    def compact_rows(
        self,
        buffers: Sequence[mx.array],
        kept: mx.array,
        lines: Sequence[int],
        start: int = 0,
        tail: int = 0,
        *,
        stream: StreamLike = None,
    ) -> list[mx.array]:
        """Of the sequences in ``lines`` the rows in the slots ``kept`` uint32 [b, H, K], ascending,
        and then ``tail`` rows from slot ``start`` on, in the first slots of each buffer."""
        compact = self.function("compact_rows")
        return cast("list[mx.array]", compact(buffers, kept, lines, start, tail, stream))

    def merge_segments(
        self, outs: Sequence[mx.array], lses: Sequence[mx.array], *, stream: StreamLike = None
    ) -> tuple[mx.array, mx.array]:
        """Attention over rows in segments put together: out and lse."""
        merge = self.function("merge_segments")
        return cast("tuple[mx.array, mx.array]", merge(outs, lses, stream))

    def segment_rows(
        self,
        tiers: Sequence[mx.array],
        newest: mx.array,
        bits: Sequence[int],
        group_size: int,
        slots: mx.array | None = None,
        to: int = 0,
        *,
        stream: StreamLike = None,
    ) -> list[mx.array]:
        """Packed rows in ``tiers``, words, scales and biases of each, and behind them the dense
        ``newest``: as one array, or packed with ``to`` bits; only the rows at ``slots``, if any."""
        found = self.function("segment_rows")(tiers, newest, bits, group_size, slots, to, stream)
        return cast("list[mx.array]", found)


def attention_request(
    queries: mx.array,
    keys: mx.array | Packed,
    values: mx.array | Packed,
    scale: float,
    causal: bool,
    mask: mx.array | None,
    sinks: mx.array | None,
    probes: mx.array | None,
    bits: tuple[int, int],
    group_size: int,
    sparse_v_threshold: float,
    return_scores: bool,
    return_lse: bool,
    stream: StreamLike,
) -> AttentionRequest:
    """The request of arguments that are known to be right."""
    threshold, rows = 0.0, keys[0].shape[2] if isinstance(keys, tuple) else keys.shape[2]
    if mask is not None:
        threshold = MASK_THRESHOLDS.get(mask.dtype, 0.0)
        mask = mx.broadcast_to(mask, (*queries.shape[:3], rows), stream=stream)
    if isinstance(keys, tuple) and isinstance(values, tuple):
        stored = QuantizedRows(*keys, bits[0], group_size)
        others = QuantizedRows(*values, bits[1], group_size)
        return AttentionRequest(
            queries, stored, others, scale, causal, mask, sinks, threshold, sparse_v_threshold,
            probes, return_scores, return_lse, False, stream,
        )  # fmt: skip
    assert isinstance(keys, mx.array) and isinstance(values, mx.array)
    return AttentionRequest(
        queries, keys, values, scale, causal, mask, sinks, threshold, 0.0, probes, return_scores,
        return_lse, False, stream,
    )  # fmt: skip
