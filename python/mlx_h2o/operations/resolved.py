"""The operations for arguments that are known to be right, and the base of what serves them.

``backends.resolve`` hands out who serves. Our caches call it; the functions of ``fast`` check what
a user passed, and call the same.
"""

from __future__ import annotations

import contextvars
import os
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_h2o.operations import composed
from mlx_h2o.operations.arguments import placed
from mlx_h2o.operations.composed import (
    accumulating,
    buffers,
    compaction,
    folding,
    merging,
    prefill,
    turbo,
)
from mlx_h2o.operations.requests import AttentionRequest, AttentionResult, attention_request

ENVIRONMENT = "MLX_H2O_BACKEND"
current: contextvars.ContextVar[str | None] = contextvars.ContextVar("mlx_h2o_backend")
"""The back end that ``use_backend`` names."""

Attended = tuple[mx.array, mx.array | None, mx.array | None, mx.array | None]
"""Out, scores, lse and skipped; None where it was not asked for."""


@cache
def from_environment() -> str | None:
    """What the variable names. It is read once."""
    return os.environ.get(ENVIRONMENT) or None


def named() -> str | None:
    """The back end that was named for this context, else by the environment, else None."""
    name = current.get(None)
    return from_environment() if name is None else name


class Operations:
    """The back end "composed": every operation by its definition. The others are derived from it,
    and bring functions of their own for some.

    Arguments are those of ``fast`` under the names of the table, and nobody checks them. ``keys``
    and ``values`` are arrays, or tuples of words, scales and biases, or of words and norms, with
    ``bits``, ``v_bits`` and ``group_size``. ``mask`` is an array, and excludes ``causal``. A
    ``row_bias`` masks no row. Numbers per sequence are an int, or int32 [] or [B].
    """

    name = "composed"

    accumulate_scores = staticmethod(accumulating.accumulate_scores)
    keep_indices = staticmethod(composed.keep_indices)
    key_diversity = staticmethod(composed.key_diversity)
    prefill_scores = staticmethod(prefill.prefill_scores)
    quantize_append = staticmethod(buffers.quantize_append)
    append_rows = staticmethod(buffers.append_rows)
    put_rows = staticmethod(buffers.put_rows)
    put_each = staticmethod(buffers.put_each)
    compact_rows = staticmethod(compaction.compact_rows)
    fold = staticmethod(folding.fold)
    merge_segments = staticmethod(merging.merge_segments)
    segment_rows = staticmethod(merging.segment_rows)
    encode_rows = staticmethod(turbo.encode_rows)
    decode_rows = staticmethod(turbo.decode_rows)
    reserved_rows = staticmethod(buffers.reserved_rows)
    discard_rows = staticmethod(buffers.discard_rows)
    commits_pages = staticmethod(buffers.commits_pages)
    committed_bytes = staticmethod(buffers.committed_bytes)

    def unavailable_reason(self) -> str:
        """Why it does not run on this machine; empty if it does."""
        return ""

    def advice(self) -> str:
        """How to make it available, where this machine could."""
        return ""

    def ready(self) -> None:
        """It is available, and about to serve."""

    def refuses(self, request: AttentionRequest) -> str:
        """Why it cannot serve this request; empty if it can."""
        return ""

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Attention that was not refused."""
        return composed.attention(request)

    def accumulate(
        self, request: AttentionRequest, importance: mx.array, decay: float | None
    ) -> tuple[mx.array, mx.array]:
        """``attention_and_accumulate`` that was not refused: ``add_mass`` of the weights, where
        ``decay`` is None, or the moving average of the scores."""
        request.return_scores, request.return_lse = decay is not None, False
        found: Any = self.attend(request)
        with placed(request.stream):
            if decay is None:
                new = accumulating.add_mass(importance, found.weights)
            else:
                new = accumulating.add_average(importance, found.scores, decay, request.hides)
            # Untied, the scores of every step would wait for someone to ask, graph and all.
            return mx.depends(found.out, [new]), new

    def serving(self, request: AttentionRequest, op: str = "attention") -> Operations:
        """Itself, or else the composition. Raises ValueError where it was named and cannot."""
        reason = self.refuses(request)
        if not reason:
            return self
        if named() is None:
            return COMPOSED
        raise ValueError(f"[{op}] back end {self.name!r} cannot serve this call: {reason}")

    # What a back end may take over whole, so that a step costs no call in between.

    def attention(self, *rows: Any, return_scores: bool = False, **options: Any) -> Attended:
        """Of queries, keys and values, and what they are told and asked for by name."""
        request = attention_request(*rows, return_scores=return_scores, bias_masks=False, **options)
        return self.serving(request).attend(request)[:4]

    def attention_and_accumulate(
        self, queries: mx.array, keys: Any, values: Any, importance: mx.array, *, scale: float,
        decay: float | None, causal: bool = False, mask: mx.array | None = None,
        sinks: mx.array | None = None, row_bias: mx.array | None = None, **packing: Any,
    ) -> tuple[mx.array, mx.array]:  # fmt: skip
        """Of the same and ``importance``: out and the new one, the mass where ``decay`` is None."""
        short = self is COMPOSED and decay is None and not (causal or packing) and sinks is None
        if short and (mask is None or (mask.dtype == mx.bool_ and mask.shape[1:3] == (1, 1))):
            return composed.step(queries, keys, values, importance, scale, mask, row_bias)
        packing |= {"mask": mask, "sinks": sinks, "row_bias": row_bias, "bias_masks": False}
        request = attention_request(queries, keys, values, scale=scale, causal=causal, **packing)
        served = self.serving(request, "attention_and_accumulate")
        return served.accumulate(request, importance, decay)


COMPOSED = Operations()
