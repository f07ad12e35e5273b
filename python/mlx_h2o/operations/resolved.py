"""The operations on arguments that are known to be valid: the base class of all back ends.

``backends.resolve`` chooses the back end. Our caches call its methods directly; the functions of
``fast`` first check the user's arguments.
"""

import contextvars
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_h2o.operations import composed
from mlx_h2o.operations.composed import accumulating, buffers, folding, merging, prefill, turbo
from mlx_h2o.operations.requests import AttentionRequest, AttentionResult, attention_request

ENVIRONMENT = "MLX_H2O_BACKEND"
current: contextvars.ContextVar[str | None] = contextvars.ContextVar("mlx_h2o_backend")
"""The back end that ``use_backend`` names."""

Attended = tuple[mx.array, mx.array | None, mx.array | None, mx.array | None]
"""Out, scores, lse and skipped; None for what was not requested."""


@cache
def from_environment() -> str | None:
    """The back end that the environment variable names. It is read once."""
    return os.environ.get(ENVIRONMENT) or None


def named() -> str | None:
    """The back end that was named for this context, else by the environment, else None."""
    name = current.get(None)
    return from_environment() if name is None else name


class Operations:
    """The back end "composed": every operation by its definition. Other back ends derive from it
    and override some operations.

    Arguments are those of ``fast`` under the names of the table, and are not checked. ``keys``
    and ``values`` are arrays, or tuples of words, scales and biases, or of words and norms, with
    ``bits``, ``v_bits`` and ``group_size``. ``mask`` is an array, and excludes ``causal``. A
    ``row_bias`` masks no row. Numbers per sequence are an int, or int32 [] or [B]. Everything runs
    on MLX's default stream, which ``fast`` sets for its callers.
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
    compact_rows = staticmethod(buffers.compact_rows)
    fold = staticmethod(folding.fold)
    merge_segments = staticmethod(merging.merge_segments)
    segment_rows = staticmethod(merging.segment_rows)
    encode_rows = staticmethod(turbo.encode_rows)
    decode_rows = staticmethod(turbo.decode_rows)

    def reserved_rows(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """Zeros [B, H, C, width]. A back end may take their memory page by page, as rows are
        written; ``discard_rows`` then gives pages back, and ``committed_bytes`` counts those in
        use."""
        return mx.zeros(shape, dtype)

    def discard_rows(self, buffer: mx.array, from_slot: int) -> int:
        """Give back the memory of the rows from a slot on, which then read as zeros; returns its
        bytes. Needs a back end that can, and an evaluated buffer that nothing else holds."""
        return 0

    def committed_bytes(self, buffer: mx.array) -> int:
        """Bytes of a buffer that are in memory."""
        return buffer.nbytes

    def commits_pages(self) -> bool:
        """Whether memory of ``reserved_rows`` is taken page by page."""
        return False

    def unavailable_reason(self) -> str:
        """Why this back end does not run on this machine; empty if it does."""
        return ""

    def advice(self) -> str:
        """How to make it available, if this machine could run it."""
        return ""

    def ready(self) -> None:
        """Called when the back end is available and about to serve."""

    def refuses(self, request: AttentionRequest) -> str:
        """Why the back end cannot serve this request; empty if it can."""
        return ""

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Attention for a request that was not refused."""
        return composed.attention(request)

    def accumulate(
        self, request: AttentionRequest, importance: mx.array, decay: float | None
    ) -> tuple[mx.array, mx.array]:
        """``attention_and_accumulate`` for a request that was not refused: the moving average of
        the scores, or if ``decay`` is None ``add_mass`` of the weights."""
        request.return_scores, request.return_lse = decay is not None, False
        found: Any = self.attend(request)
        if decay is None:
            new = accumulating.add_mass(importance, found.weights)
        else:
            new = accumulating.add_average(importance, found.scores, decay, request.hides)
        # Untied, the new importance would stay unevaluated, and keep every step's graph alive.
        return mx.depends(found.out, [new]), new

    def serving(self, request: AttentionRequest, op: str = "attention") -> "Operations":
        """This back end, or composed if it refuses; if it was named, raises ValueError instead."""
        reason = self.refuses(request)
        if not reason:
            return self
        if named() is None:
            return COMPOSED
        raise ValueError(f"[{op}] back end {self.name!r} cannot serve this call: {reason}")

    # A back end may replace these as a whole, which saves calls in every step.

    def attention(self, *rows: Any, return_scores: bool = False, **options: Any) -> Attended:
        """Attention over queries, keys and values, with fields of the request as options."""
        request = attention_request(*rows, return_scores=return_scores, bias_masks=False, **options)
        return self.serving(request).attend(request)[:4]

    def attention_and_accumulate(
        self, *rows: Any, decay: float | None, **options: Any
    ) -> tuple[mx.array, mx.array]:
        """The output and the new importance, for queries, keys, values and the importance so far:
        the moving average if there is a ``decay``, else the mass. Options are those of
        ``attention``."""
        if self is COMPOSED and decay is None:
            found = composed.step(*rows, **options)
            if found is not None:
                return found
        request = attention_request(*rows[:3], bias_masks=False, **options)
        served = self.serving(request, "attention_and_accumulate")
        return served.accumulate(request, rows[3], decay)


COMPOSED = Operations()
