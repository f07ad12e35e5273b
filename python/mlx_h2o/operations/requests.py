"""What back ends receive: arguments that are known to be right.

``fast`` makes them of what a user passes, and ``resolved`` of what our own caches pass. They are
made once per layer and token, so nothing here is a frozen dataclass, which takes longer to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.arguments import StreamLike

ATTENTION = "scaled_dot_product_attention_with_scores"
QUANTIZED_ATTENTION = "scaled_dot_product_attention_quantized_with_scores"

MASK_THRESHOLDS = {
    mx.bool_: 0.0,
    **{dtype: float(mx.finfo(dtype).min) / 2 for dtype in arguments.FLOATS},
}
"""At or below it an additive mask masks: models mask with the lowest finite value and with -inf."""

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


def in_parts(rows: Any) -> Any:
    """Rows as the parts that there are, and a list that ``mx.quantize`` made as a tuple."""
    if isinstance(rows, list) and len(rows) == 3:
        rows = tuple(rows)
    if isinstance(rows, tuple) and len(rows) == 3:
        return rows if rows[2] is not None else rows[:2] if rows[1] is not None else rows[:1]
    return rows


def stored_rows(rows: mx.array | Parts, bits: int, group_size: int) -> StoredRows:
    """Rows as they are handed over: an array, words and norms, or words, scales and biases."""
    if isinstance(rows, mx.array):
        return rows
    if len(rows) == 1:
        return rows[0]
    if len(rows) == 2:
        return TurboRows(rows[0], rows[1], bits)
    return QuantizedRows(rows[0], rows[1], rows[2], bits, group_size)


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

    ``attention`` has the queries that count, its values are ignored; ``importance`` is None
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


def attention_request(
    queries: mx.array,
    keys: mx.array | Parts,
    values: mx.array | Parts,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    row_bias: mx.array | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    return_scores: bool = True,
    return_lse: bool = False,
    return_skipped: bool = False,
    stream: StreamLike = None,
    op: str = "",
    importance: mx.array | None = None,
    **numbers: float,
) -> AttentionRequest:
    """Check the arguments of an operation of attention, which introduces errors; ``numbers`` are
    those of the table.

    Raises TypeError and ValueError as ``fast`` documents.
    """
    keys, values = in_parts(keys), in_parts(values)
    packed = isinstance(keys, tuple)
    op = op or (QUANTIZED_ATTENTION if packed else ATTENTION)
    how = {}
    if op != ATTENTION and op != "prefill_scores":
        how = arguments.packing(op, bits, v_bits, group_size)
    if isinstance(mask, str) and mask != "causal":
        raise ValueError(f"[{op}] mask is {mask!r}, expected 'causal', an array or None.")
    pairs = None if isinstance(mask, str) else mask
    given: tuple[Any, ...]
    if op == "prefill_scores":  # its values are ignored
        given = queries, keys, pairs, sinks, row_bias, importance
    elif op == "attention_and_accumulate":
        given = queries, keys, values, importance, pairs, sinks, row_bias
    else:
        given = queries, keys, values, pairs, sinks, row_bias
    arguments.sizes(op, *given, **how)
    if packed:
        _check_pair(op, len(keys), len(values))
    number = arguments.number(op, "scale", scale)
    checked: dict[str, Any] = {n: arguments.number(op, n, value) for n, value in numbers.items()}
    place = arguments.stream(op, stream)
    bits = how.get("bits", bits)
    stored = stored_rows(keys, bits, how.get("group_size", group_size))
    threshold = 0.0
    if pairs is not None:
        threshold = MASK_THRESHOLDS[pairs.dtype]
        pairs = mx.broadcast_to(pairs, (*queries.shape[:3], stored.shape[2]), stream=place)
    return AttentionRequest(
        queries=queries,
        keys=stored,
        values=stored_rows(values, how.get("v_bits", bits), group_size),
        scale=number,
        causal=isinstance(mask, str),
        mask=pairs,
        sinks=sinks,
        mask_threshold=threshold,
        return_scores=bool(return_scores),
        return_lse=bool(return_lse),
        return_skipped=bool(return_skipped),
        stream=place,
        row_bias=row_bias,
        **checked,
    )


def _check_pair(op: str, keys: int, values: int) -> None:
    if values == 1 or (keys, values) == (1, 3):
        raise ValueError(
            f"[{op}] keys and values are {keys} and {values} arrays, expected both packed, or one "
            "array of keys beside codes."
        )
