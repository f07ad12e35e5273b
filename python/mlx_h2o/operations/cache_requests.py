"""Checks of the operations on a cache's rows."""

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.arguments import FLOATS, StreamLike
from mlx_h2o.operations.arguments import found as _found
from mlx_h2o.operations.ema import MAX_QUERIES
from mlx_h2o.operations.replace_requests import as_packed
from mlx_h2o.operations.replace_requests import replace_request as replace_request
from mlx_h2o.operations.requests import (
    AccumulateRequest,
    AttentionAccumulateRequest,
    KeyDiversityRequest,
    Packed,
)
from mlx_h2o.operations.validate import attention_request
from mlx_h2o.operations.validate_quantized import quantized_attention_request


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
    return AccumulateRequest(importance, scores, arguments.decay(op, decay), bool(masked), place)


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
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    sparse_v_threshold: float = 0.0,
    stream: StreamLike = None,
) -> AttentionAccumulateRequest:
    """Check the arguments of ``attention_and_accumulate``."""
    op = "attention_and_accumulate"
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
    return AttentionAccumulateRequest(attention, importance, arguments.decay(op, decay))


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
