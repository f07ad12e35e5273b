"""What back ends receive: arguments that are known to be valid.

``fast`` has checked them, or our own caches passed them. Requests are made once per layer and
token, so none is a frozen dataclass, which takes longer to make.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_h2o.operations.arguments import FLOATS

MASK_THRESHOLDS = {
    mx.bool_: 0.0,
    **{dtype: float(mx.finfo(dtype).min) / 2 for dtype in FLOATS},
}
"""Additive masks mask at or below this: models use the lowest finite value as well as -inf."""

QUERIES = 128
"""Queries per block, where attention stores the logits of all queries and keys."""

Parts = tuple[mx.array, ...]
"""Rows as they are stored, arrays [B, H, N, ...]: words, scales and biases, or words and norms, or
the rows alone."""

PerSequence = int | mx.array
"""One number for all sequences, or int32 [] or [B]."""


StoredRows = mx.array | Parts
"""Keys or values of any kind: an array; uint32 words, and a scale and a bias for each group of
elements, as ``mx.quantize`` packs them; or words of codes and norms, float32 [B, Hkv, N, 1], as
``turbo`` does."""


def are_codes(rows: StoredRows) -> bool:
    """Whether rows are codes of rotated rows."""
    return isinstance(rows, tuple) and len(rows) == 2


def first_part(rows: StoredRows) -> mx.array:
    """The rows as an array, or their words: [B, Hkv, N, ...]."""
    return rows[0] if isinstance(rows, tuple) else rows


@dataclass(slots=True, eq=False)
class AttentionRequest:
    """One attention call. Shapes as in ``fast``; nothing has been copied.

    ``keys`` and ``values`` may be of different kinds; ``bits``, ``v_bits`` and ``group_size`` say
    how they are packed, and mean nothing for arrays. ``mask``, [B or 1, Hq or 1, Lq, N]
    (strides may be 0), is bool or additive; an entry at or below its ``MASK_THRESHOLDS`` masks its
    pair. With ``causal`` it is None, or the causal mask. ``row_bias``, float32 [B, Hkv, N or
    more], is added on top; at or below the lowest finite number it masks its row, unless
    ``bias_masks`` is False. Packed values whose weight is below ``sparse_v_threshold`` add nothing
    to the output; 0: all count. If ``return_scores``, ``return_lse`` or ``return_skipped`` is
    False, the back end may return None there.
    """

    queries: mx.array
    keys: StoredRows
    values: StoredRows
    scale: float
    causal: bool = False
    mask: mx.array | None = None
    sinks: mx.array | None = None
    sparse_v_threshold: float = 0.0
    return_scores: bool = True
    return_lse: bool = False
    return_skipped: bool = False
    row_bias: mx.array | None = None
    bias_masks: bool = True
    bits: int = 8
    group_size: int = 64
    v_bits: int = 8

    @property
    def is_packed(self) -> bool:
        """Whether keys or values are packed."""
        return isinstance(self.keys, tuple) or isinstance(self.values, tuple)

    @property
    def has_codes(self) -> bool:
        """Whether keys or values are codes of rotated rows."""
        return are_codes(self.keys) or are_codes(self.values)

    @property
    def row_count(self) -> int:
        """N."""
        return (self.keys[0] if isinstance(self.keys, tuple) else self.keys).shape[2]

    @property
    def value_size(self) -> int:
        """Dv."""
        rows = self.values
        return rows[0].shape[3] * 32 // self.v_bits if isinstance(rows, tuple) else rows.shape[3]

    @property
    def hides(self) -> bool:
        """Whether any pair may be masked."""
        masked = self.mask is not None or (self.row_bias is not None and self.bias_masks)
        return masked or (self.causal and self.queries.shape[2] > 1)


class AttentionResult(NamedTuple):
    """The result of a request; None for what was not requested.

    A back end without its own ``accumulate`` for the mass always returns ``weights``,
    [B, Hkv, Hq / Hkv * Lq, N].
    """

    out: mx.array
    scores: mx.array | None = None
    lse: mx.array | None = None
    skipped: mx.array | None = None
    weights: mx.array | None = None


def attention_request(
    queries: mx.array,
    keys: StoredRows,
    values: StoredRows,
    *,
    scale: float,
    causal: bool = False,
    mask: mx.array | str | None = None,
    bits: int = 8,
    v_bits: int | None = None,
    **more: Any,
) -> AttentionRequest:
    """The request for valid arguments, named as in ``fast``; ``more`` are further fields."""
    if isinstance(mask, str):
        causal, mask = True, None
    if isinstance(keys, tuple) and len(keys) == 1:  # beside codes
        keys = keys[0]
    if mask is not None:
        pairs = (*queries.shape[:3], first_part(keys).shape[2])
        mask = mask if mask.shape[2:] == pairs[2:] else mx.broadcast_to(mask, pairs)
    more |= {"bits": bits, "v_bits": v_bits or bits}
    return AttentionRequest(queries, keys, values, scale, causal, mask, **more)


def last_queries(request: AttentionRequest, count: int) -> AttentionRequest:
    """The request for the last ``count`` queries; a bottom-right causal mask fits unchanged."""
    return part_of(request, slice(-count, None), slice(None))


def part_of(
    request: AttentionRequest, queries: slice, keys: slice, after: Sequence[mx.array] = ()
) -> AttentionRequest:
    """The request for some queries and some keys, with their values. It is computed after the last
    of ``after``, since MLX may otherwise begin many parts before it ends the first."""
    asked, mask, bias = request.queries[:, :, queries], request.mask, request.row_bias

    def rows(stored: StoredRows) -> StoredRows:
        if isinstance(stored, tuple):
            return tuple(part[:, :, keys] for part in stored)
        return stored[:, :, keys]

    return replace(
        request, queries=mx.depends(asked, after[-1:]) if after else asked,
        keys=rows(request.keys), values=rows(request.values),
        mask=None if mask is None else mask[:, :, queries, keys],
        row_bias=None if bias is None else bias[:, :, keys],
    )  # fmt: skip


def in_blocks(
    request: AttentionRequest, attend: Callable[[AttentionRequest], AttentionResult]
) -> AttentionResult:
    """The output that ``attend`` makes of blocks of queries, one after the other."""
    length, rows = request.queries.shape[2], request.row_count
    found: list[mx.array] = []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        seen = max(1, rows - length + stop) if request.causal else rows
        found.append(attend(part_of(request, slice(start, stop), slice(seen), found)).out)
    return AttentionResult(mx.concatenate(found, axis=2))
