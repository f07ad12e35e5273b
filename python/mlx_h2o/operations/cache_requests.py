"""Checks of the operations on a cache's rows, and the validated requests that back ends receive.

Requests are named tuples, which are made faster than frozen dataclasses: some are made once per
layer and token.
"""

from typing import Literal, NamedTuple

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.arguments import StreamLike
from mlx_h2o.operations.ema import MAX_QUERIES
from mlx_h2o.operations.replace_requests import Packed, as_packed, zones
from mlx_h2o.operations.replace_requests import RankName as RankName
from mlx_h2o.operations.replace_requests import ReplaceRequest as ReplaceRequest
from mlx_h2o.operations.replace_requests import replace_request as replace_request
from mlx_h2o.operations.validate import FLOATS, AttentionRequest, attention_request, dtype_name
from mlx_h2o.operations.validate_quantized import (
    QuantizedAttentionRequest,
    quantized_attention_request,
)


class AccumulateRequest(NamedTuple):
    """One validated call of ``accumulate_scores``; ``masked`` is False if no score is masked."""

    importance: mx.array
    scores: mx.array
    decay: float
    masked: bool = True
    stream: StreamLike = None


class AttentionAccumulateRequest(NamedTuple):
    """One validated call of ``attention_and_accumulate``.

    With ``positions`` the row is wanted that ``evict_indices`` of the new importance and these
    zones names.
    """

    attention: AttentionRequest | QuantizedAttentionRequest
    importance: mx.array
    decay: float
    positions: mx.array | None = None
    sink_size: int = 0
    recent_start: int | None = None


class PrefillRequest(NamedTuple):
    """One validated call of ``prefill_scores``.

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
    """One validated call of ``key_diversity``."""

    keys: mx.array
    stream: StreamLike = None


def _found(array: mx.array) -> str:
    return f"{dtype_name(array.dtype)} {array.shape}"


def _decay(op: str, decay: object) -> float:
    found = arguments.number(op, "decay", decay)
    if not 0 <= found < 1:
        raise ValueError(f"[{op}] decay is {found}, expected at least 0 and below 1.")
    return found


def _check_queries(op: str, found: int) -> None:
    if found > MAX_QUERIES:
        raise ValueError(f"[{op}] found {found} queries, expected at most {MAX_QUERIES}.")


def accumulate_request(
    importance: mx.array,
    scores: mx.array,
    *,
    decay: float,
    masked: bool = True,
    stream: StreamLike = None,
) -> AccumulateRequest:
    """Check the arguments of ``accumulate_scores``."""
    op = "accumulate_scores"
    importance = arguments.array(op, "importance", importance)
    scores = arguments.array(op, "scores", scores)
    found, rows = scores.shape, importance.shape
    if len(found) != 4 or 0 in found or scores.dtype != mx.float32:
        raise ValueError(
            f"[{op}] scores are {_found(scores)}, expected float32 [B, Hq, Lq, N], "
            "every size at least 1."
        )
    _check_importance(op, importance, found[0], found[3])
    if found[1] % rows[1]:
        raise ValueError(
            f"[{op}] scores have {found[1]} heads, "
            f"expected a multiple of the {rows[1]} heads of importance."
        )
    _check_queries(op, found[2])
    place = arguments.stream(op, stream)
    return AccumulateRequest(importance, scores, _decay(op, decay), bool(masked), place)


def _check_importance(op: str, importance: mx.array, batch: int, rows: int) -> None:
    shape = importance.shape
    fits = len(shape) == 3 and shape[0] == batch and shape[2] == rows and shape[1] > 0
    if not fits or importance.dtype != mx.float32:
        raise ValueError(
            f"[{op}] importance is {_found(importance)}, "
            f"expected float32 [B, H, N] with B = {batch}, N = {rows}."
        )


def attention_accumulate_request(
    queries: mx.array,
    keys: mx.array | Packed,
    values: mx.array | Packed,
    importance: mx.array,
    *,
    scale: float,
    decay: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    positions: mx.array | None = None,
    sink_size: int = 0,
    recent_start: int | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    sparse_v_threshold: float = 0.0,
    stream: StreamLike = None,
) -> AttentionAccumulateRequest:
    """Check the arguments of ``attention_and_accumulate``."""
    op = "attention_and_accumulate"
    attention: AttentionRequest | QuantizedAttentionRequest
    keys, values = as_packed(keys), as_packed(values)
    if isinstance(keys, tuple) and isinstance(values, tuple):
        attention = quantized_attention_request(
            queries, keys, values, scale=scale, bits=bits, group_size=group_size, v_bits=v_bits,
            mask=mask, sinks=sinks, sparse_v_threshold=sparse_v_threshold, stream=stream, op=op,
        )  # fmt: skip
    elif isinstance(keys, tuple) or isinstance(values, tuple):
        raise TypeError(
            f"[{op}] keys and values are {type(keys).__name__} and {type(values).__name__}, "
            "expected two arrays, or two tuples of words, scales and biases."
        )
    else:
        if sparse_v_threshold != 0:
            raise ValueError(
                f"[{op}] sparse_v_threshold is {sparse_v_threshold}, expected 0 with dense rows."
            )
        attention = attention_request(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks, stream=stream, op=op
        )
    importance = arguments.array(op, "importance", importance)
    batch, heads, rows = attention.keys.shape[:3]
    _check_importance(op, importance, batch, rows)
    if importance.shape[1] != heads:
        raise ValueError(
            f"[{op}] importance has {importance.shape[1]} heads, expected {heads} as the keys."
        )
    _check_queries(op, queries.shape[2])
    decay = _decay(op, decay)
    if positions is None:
        if sink_size != 0 or recent_start is not None:
            raise ValueError(
                f"[{op}] sink_size and recent_start are {sink_size} and {recent_start} without "
                "positions, expected positions with them."
            )
        return AttentionAccumulateRequest(attention, importance, decay)
    positions = arguments.array(op, "positions", positions)
    if positions.shape != importance.shape or positions.dtype != mx.int32:
        raise ValueError(
            f"[{op}] positions are {_found(positions)}, "
            f"expected int32 [B, H, N] = {importance.shape}."
        )
    return AttentionAccumulateRequest(
        attention, importance, decay, positions, *zones(op, sink_size, recent_start)
    )


def key_diversity_request(keys: mx.array, *, stream: StreamLike = None) -> KeyDiversityRequest:
    """Check the arguments of ``key_diversity``."""
    op = "key_diversity"
    keys = arguments.array(op, "keys", keys)
    if keys.ndim != 4 or 0 in keys.shape or keys.dtype not in FLOATS:
        raise ValueError(
            f"[{op}] keys are {_found(keys)}, expected float32, float16 or bfloat16 "
            "[B, H, N, D], every size at least 1."
        )
    return KeyDiversityRequest(keys, arguments.stream(op, stream))
