"""The operations as some back ends serve them, for arguments that are known to be right.

``backends.resolve`` hands them out. Our caches call them; the functions of ``fast`` check what a
user passed, and call the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import mlx.core as mx

from mlx_h2o.operations import composed
from mlx_h2o.operations.composed import buffers, compaction, folding, merging, prefill, turbo
from mlx_h2o.operations.composed import rows as composed_rows
from mlx_h2o.operations.requests import (
    AttentionRequest,
    AttentionResult,
    attention_request,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])
Attended = tuple[mx.array, mx.array | None, mx.array | None, mx.array | None]
"""Out, scores, lse and skipped; None where it was not asked for."""


class Backend(Protocol):
    """What the dispatch asks of a back end; it may have more."""

    @property
    def name(self) -> str: ...

    def unavailable_reason(self) -> str: ...

    def refuses(self, request: AttentionRequest) -> str: ...

    def attention(self, request: AttentionRequest) -> AttentionResult: ...


class Operations:
    """What ``candidates`` serve, the preferred first; ``named``, if one of them was asked for.

    Arguments are those of ``fast`` under the names of the table, and nobody checks them. ``keys``
    and ``values`` are arrays, or tuples of words, scales and biases, or of words and norms, with
    ``bits``, ``v_bits`` and ``group_size``. ``mask`` is an array, and excludes ``causal``. A
    ``row_bias`` masks no row. Numbers per sequence are an int, or int32 [] or [B].
    """

    def __init__(self, named: str | None, candidates: Sequence[Backend]) -> None:
        self._named = named
        self._candidates = tuple(candidates)
        self.name = candidates[0].name
        self._fused = {b.name: getattr(b, "attention_and_accumulate", None) for b in candidates}
        # What a back end may take over whole, so that a step costs no call in between.
        self.attention: Callable[..., Attended] = self._attention
        """Of queries, keys and values, and what they are told and asked for by name."""
        self.attention_and_accumulate: Callable[..., tuple[mx.array, mx.array]] = self._accumulating
        """Of the same and ``importance``: out and the new one, the mass where ``decay`` is None."""
        self.output: Callable[..., mx.array] = self._output
        """Attention over arrays without scores, of the arguments of ``attention``."""
        self.accumulate_scores = self.function(composed_rows.accumulate_scores)
        self.keep_indices = self.function(composed.keep_indices)
        self.key_diversity = self.function(composed_rows.key_diversity)
        self.prefill_scores = self.function(prefill.prefill_scores)
        self.quantize_append = self.function(composed_rows.quantize_append)
        self.append_rows = self.function(buffers.append_rows)
        self.append_quantized = self.function(buffers.append_quantized)
        self.put_rows = self.function(buffers.put_rows)
        self.put_each = self.function(buffers.put_each)
        self.compact_rows = self.function(compaction.compact_rows)
        self.fold = self.function(folding.fold)
        self.merge_segments = self.function(merging.merge_segments)
        self.segment_rows = self.function(merging.segment_rows)
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

    def function(self, definition: _Function) -> _Function:
        """The function of a back end that has the name of this definition, else the definition."""
        for backend in self._candidates:
            found = getattr(backend, definition.__name__, None)
            if found is not None:
                return cast(_Function, found)
        return definition

    def serve_attention(self, request: AttentionRequest, op: str = "attention") -> AttentionResult:
        return self.backend_for(request, op).attention(request)

    def serve_accumulating(
        self, request: AttentionRequest, importance: mx.array, decay: float | None
    ) -> tuple[mx.array, mx.array]:
        """``attention_and_accumulate``, in one operation where a back end has it."""
        op, request.return_lse = "attention_and_accumulate", decay is None
        backend = self.backend_for(request, op)
        fused = self._fused[backend.name]
        if fused is not None:
            return cast("tuple[mx.array, mx.array]", fused(request, importance, decay))
        return composed_rows.attention_and_accumulate(request, importance, decay, backend.attention)

    def _attention(self, *rows: Any, return_scores: bool = False, **options: Any) -> Attended:
        request = attention_request(*rows, return_scores=return_scores, bias_masks=False, **options)
        return self.serve_attention(request)[:4]

    def _accumulating(
        self, queries: mx.array, keys: Any, values: Any, importance: mx.array, *,
        decay: float | None, **options: Any,
    ) -> tuple[mx.array, mx.array]:  # fmt: skip
        request = attention_request(queries, keys, values, bias_masks=False, **options)
        return self.serve_accumulating(request, importance, decay)

    def _output(self, *rows: mx.array, **options: Any) -> mx.array:
        return self.attention(*rows, **options)[0]
