"""Checks of attention's arguments where rows are packed, or may be."""

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.arguments import BITS as BITS
from mlx_h2o.operations.arguments import GROUP_SIZES as GROUP_SIZES
from mlx_h2o.operations.requests import AttentionRequest, QuantizedRows
from mlx_h2o.operations.validate import (
    FLOATS,
    Shape,
    StreamLike,
    check_sinks,
    dtype_name,
    placed_mask,
)

QUANTIZED_ATTENTION = "scaled_dot_product_attention_quantized_with_scores"


def _check_queries(op: str, queries: mx.array) -> None:
    if queries.ndim != 4:
        raise ValueError(
            f"[{op}] queries have {queries.ndim} dimensions, expected 4 [B, Hq, Lq, D]."
        )
    if 0 in queries.shape:
        raise ValueError(
            f"[{op}] queries are empty: found shape {queries.shape}, "
            "expected every size of [B, Hq, Lq, D] to be at least 1."
        )
    if queries.dtype not in FLOATS:
        raise ValueError(
            f"[{op}] queries are {dtype_name(queries.dtype)}, "
            "expected float32, float16 or bfloat16."
        )


def packed_rows(
    op: str,
    name: str,
    rows: tuple[object, object, object],
    *,
    bits: int,
    group_size: int,
) -> QuantizedRows:
    """Check that words, scales and biases make rows [B, Hkv, N, D] together.

    ``name`` is that of one row in messages, "key" or "value".
    """
    arrays = []
    for part, array in zip(("words", "scales", "biases"), rows, strict=True):
        found = arguments.array(op, f"{name} {part}", array)
        if found.ndim != 4:
            raise ValueError(
                f"[{op}] {name} {part} have {found.ndim} dimensions, expected 4 [B, Hkv, N, ...]."
            )
        if 0 in found.shape:
            raise ValueError(
                f"[{op}] {name} {part} are empty: found shape {found.shape}, "
                "expected every size to be at least 1."
            )
        arrays.append(found)
    words, scales, biases = arrays
    if words.dtype != mx.uint32:
        raise ValueError(f"[{op}] {name} words are {dtype_name(words.dtype)}, expected uint32.")
    if scales.dtype not in FLOATS or scales.dtype != biases.dtype:
        raise ValueError(
            f"[{op}] {name} scales and biases are {dtype_name(scales.dtype)} and "
            f"{dtype_name(biases.dtype)}, expected float32, float16 or bfloat16, both the same."
        )
    packed = words.shape[3] * 32
    size = packed // bits
    if packed % bits or size % group_size:
        raise ValueError(
            f"[{op}] {name} words have {words.shape[3]} words per row, which at {bits} bits is "
            f"not a multiple of the group size {group_size}."
        )
    expected = (*words.shape[:3], size // group_size)
    for part, array in (("scales", scales), ("biases", biases)):
        if array.shape != expected:
            raise ValueError(
                f"[{op}] {name} {part} have shape {array.shape}, expected {expected} for rows of "
                f"{size} elements in groups of {group_size}."
            )
    return QuantizedRows(words, scales, biases, bits, group_size)


def _check_together(op: str, queries: Shape, keys: QuantizedRows, values: QuantizedRows) -> None:
    k, v = keys.shape, values.shape
    same = (
        ("queries and keys have batch sizes", queries[0], k[0]),
        ("keys and values have batch sizes", k[0], v[0]),
        ("queries and keys have head sizes", queries[3], k[3]),
        ("keys and values have head counts", k[1], v[1]),
        ("keys and values have lengths", k[2], v[2]),
    )
    for what, one, other in same:
        if one != other:
            raise ValueError(f"[{op}] {what} {one} and {other}, expected the same.")
    if queries[1] % k[1]:
        raise ValueError(
            f"[{op}] queries have {queries[1]} heads, "
            f"expected a multiple of the {k[1]} heads of the keys."
        )
    if keys.scales.dtype != values.scales.dtype:
        raise ValueError(
            f"[{op}] key scales and value scales are {dtype_name(keys.scales.dtype)} and "
            f"{dtype_name(values.scales.dtype)}, expected the same dtype."
        )


def quantized_attention_request(
    queries: mx.array,
    keys: tuple[mx.array, mx.array, mx.array],
    values: tuple[mx.array, mx.array, mx.array],
    *,
    scale: float,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    sparse_v_threshold: float = 0.0,
    return_scores: bool = True,
    return_lse: bool = False,
    return_skipped: bool = False,
    stream: StreamLike = None,
    op: str = QUANTIZED_ATTENTION,
) -> AttentionRequest:
    """Check the arguments of quantised attention; ``keys`` and ``values`` are (words, scales,
    biases). Raises TypeError and ValueError as ``fast`` documents.
    """
    queries = arguments.array(op, "queries", queries)
    _check_queries(op, queries)
    bits, value_bits, group_size = arguments.packing(op, bits, v_bits, group_size)
    packed_keys = packed_rows(op, "key", keys, bits=bits, group_size=group_size)
    packed_values = packed_rows(op, "value", values, bits=value_bits, group_size=group_size)
    _check_together(op, queries.shape, packed_keys, packed_values)
    number = arguments.number(op, "scale", scale)
    threshold = arguments.number(op, "sparse_v_threshold", sparse_v_threshold)
    if not 0 <= threshold < 1:
        raise ValueError(
            f"[{op}] sparse_v_threshold is {threshold}, expected 0 (off) or more, and below 1."
        )
    place = arguments.stream(op, stream)
    shape = (*queries.shape[:3], packed_keys.shape[2])
    causal, mask_threshold, pairs = placed_mask(op, mask, shape, place)
    if sinks is not None:
        check_sinks(op, arguments.array(op, "sinks", sinks), queries.shape[1])
    return AttentionRequest(
        queries=queries,
        keys=packed_keys,
        values=packed_values,
        scale=number,
        causal=causal,
        mask=pairs,
        sinks=sinks,
        mask_threshold=mask_threshold,
        sparse_v_threshold=threshold,
        return_scores=bool(return_scores),
        return_lse=bool(return_lse),
        return_skipped=bool(return_skipped),
        stream=place,
    )
