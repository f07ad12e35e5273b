"""What back ends receive: arguments that are known to be right.

Validation makes them of what a user passes, and ``resolved`` of what our own caches pass. They are
made once per layer and token, so nothing here is a frozen dataclass, which takes longer to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import mlx.core as mx

from mlx_h2o.operations.arguments import StreamLike

Packed = tuple[mx.array, mx.array, mx.array]
"""Rows as ``mx.quantize`` packs them: words, scales and biases."""

Codes = tuple[mx.array, mx.array]
"""Rows as ``turbo`` packs them: words and norms."""

Parts = tuple[mx.array, ...]
"""Rows as they are stored: words, scales and biases, or words and norms, or the rows alone."""

PerSequence = int | mx.array
"""One number for all sequences, or int32 [] or [B]."""


@dataclass(slots=True, eq=False)
class QuantizedRows:
    """Keys or values as ``mx.quantize`` packs them: uint32 words, and a scale and a bias for
    each ``group_size`` elements. ``shape`` is that of the dense rows, [B, Hkv, N, D].
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    @property
    def parts(self) -> Packed:
        return self.words, self.scales, self.biases

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, Hkv, N, D] of what is packed."""
        return (*self.words.shape[:3], self.words.shape[3] * 32 // self.bits)


@dataclass(slots=True, eq=False)
class TurboRows:
    """Keys or values as ``turbo`` packs them: uint32 words of codes, and norms, float32
    [B, Hkv, N, 1]. ``shape`` is that of the dense rows, [B, Hkv, N, D].
    """

    words: mx.array
    norms: mx.array
    bits: int

    @property
    def parts(self) -> Codes:
        return self.words, self.norms

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, Hkv, N, D] of what is packed."""
        return (*self.words.shape[:3], self.words.shape[3] * 32 // self.bits)


StoredRows = mx.array | QuantizedRows | TurboRows
"""Keys or values of any kind."""


def stored_rows(rows: mx.array | Packed | Codes, bits: int, group_size: int) -> StoredRows:
    """Rows as they are handed over: an array, words and norms, or words, scales and biases."""
    if isinstance(rows, mx.array):
        return rows
    if len(rows) == 2:
        return TurboRows(*rows, bits)
    return QuantizedRows(*rows, bits, group_size)


@dataclass(slots=True, eq=False)
class AttentionRequest:
    """One attention call. Shapes as in ``fast``; nothing has been copied.

    ``keys`` and ``values`` are of any kind, each of its own. ``mask`` is already broadcast to
    [B, Hq, Lq, N] (strides may be 0) and is bool or additive; an additive entry at or below
    ``mask_threshold`` masks its pair. ``causal`` and ``mask`` exclude each other. ``row_bias``,
    float32 [B, Hkv, N or more], comes on top of either; at or below the lowest finite it masks its
    row, which it never does where ``bias_masks`` is False. Of packed rows, pairs whose weight is
    below ``sparse_v_threshold`` add nothing to the output; 0: all add. Where ``return_scores``,
    ``return_lse`` or ``return_skipped`` is false the back end may give None in that place.
    """

    queries: mx.array
    keys: StoredRows
    values: StoredRows
    scale: float
    causal: bool = False
    mask: mx.array | None = None
    sinks: mx.array | None = None
    mask_threshold: float = 0.0
    sparse_v_threshold: float = 0.0
    return_scores: bool = True
    return_lse: bool = False
    return_skipped: bool = False
    stream: StreamLike = None
    row_bias: mx.array | None = None
    bias_masks: bool = True

    @property
    def is_packed(self) -> bool:
        """Whether keys or values are."""
        return not (isinstance(self.keys, mx.array) and isinstance(self.values, mx.array))

    @property
    def has_codes(self) -> bool:
        """Whether keys or values are codes of rotated rows."""
        return isinstance(self.keys, TurboRows) or isinstance(self.values, TurboRows)

    @property
    def hides(self) -> bool:
        """Whether there may be a pair that is masked."""
        masked = self.mask is not None or (self.row_bias is not None and self.bias_masks)
        return masked or (self.causal and self.queries.shape[2] > 1)


class AttentionResult(NamedTuple):
    """What a back end makes of it; None where it was not asked for.

    ``weights`` [B, Hkv, Hq / Hkv * Lq, N] come without being asked for, where a back end has no
    ``attention_and_accumulate`` of its own.
    """

    out: mx.array
    scores: mx.array | None = None
    lse: mx.array | None = None
    skipped: mx.array | None = None
    weights: mx.array | None = None


@dataclass(slots=True, eq=False)
class RetentionRequest:
    """One call of ``keep_indices``; ``count`` rows are dropped."""

    scores: mx.array
    positions: mx.array
    count: int
    sink_size: int = 0
    recent_start: PerSequence | None = None
    stream: StreamLike = None


class AccumulateRequest(NamedTuple):
    """One call of ``accumulate_scores``; ``masked`` is False if no score is masked."""

    importance: mx.array
    scores: mx.array
    decay: float
    masked: bool = True
    stream: StreamLike = None


class AttentionAccumulateRequest(NamedTuple):
    """One call of ``attention_and_accumulate``, of the mass where ``decay`` is None.

    ``importance`` may have more rows than there are keys: the others stay as they are.
    """

    attention: AttentionRequest
    importance: mx.array
    decay: float | None


class PrefillRequest(NamedTuple):
    """One call of ``prefill_scores``.

    ``attention`` has the queries that count, its values are of no account; ``importance`` is None
    where no row has been scored, and for "mass".
    """

    attention: AttentionRequest
    kind: Literal["ema", "mass"]
    importance: mx.array | None
    decay: float

    @property
    def stream(self) -> StreamLike:
        return self.attention.stream


class KeyDiversityRequest(NamedTuple):
    """One call of ``key_diversity``."""

    keys: mx.array
    stream: StreamLike = None


class QuantizeAppendRequest(NamedTuple):
    """One call of ``quantize_append``; ``v_bits`` is resolved."""

    keys: Parts
    values: Parts
    new_keys: mx.array
    new_values: mx.array
    slots: mx.array
    bits: int
    group_size: int
    v_bits: int
    stream: StreamLike = None
