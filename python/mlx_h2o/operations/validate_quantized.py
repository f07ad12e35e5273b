"""Checks of attention's arguments where rows are packed."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.arguments import BITS as BITS
from mlx_h2o.operations.arguments import FLOATS, dtype_name
from mlx_h2o.operations.arguments import GROUP_SIZES as GROUP_SIZES
from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.requests import Packed, QuantizedRows, StoredRows, TurboRows

QUANTIZED_ATTENTION = "scaled_dot_product_attention_quantized_with_scores"


def _stored_rows(op: str, name: str, rows: Sequence[Any], bits: int, group_size: int) -> StoredRows:
    """Rows [B, Hkv, N, D] of three parts: words, scales and biases; words, norms and None; or an
    array, None and None. Check that the parts fit each other.

    ``name`` is that of one row in messages, "key" or "value".
    """
    words, scales, biases = rows
    if biases is not None:
        return _packed_rows(op, name, (words, scales, biases), bits, group_size)
    layout = "[B, Hkv, N, ...]"
    words = arguments.array(op, f"{name} rows" if scales is None else f"{name} words", words)
    arguments.dimensions(op, f"{name} rows", words.shape, layout)
    arguments.not_empty(op, f"{name} rows", words.shape, layout)
    if scales is None:
        arguments.floats(op, f"{name} rows", words.dtype)
        return words
    return _codes(op, name, words, arguments.array(op, f"{name} norms", scales), bits)


def _codes(op: str, name: str, words: mx.array, norms: mx.array, bits: int) -> TurboRows:
    if bits not in turbo.BITS:
        raise ValueError(f"[{op}] {name} codes have {bits} bits, expected one of {turbo.BITS}.")
    if words.dtype != mx.uint32:
        raise ValueError(f"[{op}] {name} words are {dtype_name(words.dtype)}, expected uint32.")
    size, rest = divmod(words.shape[3] * 32, bits)
    if rest or not turbo.serves(size):
        raise ValueError(
            f"[{op}] {name} words have {words.shape[3]} words per row of {bits} bits, expected "
            f"those of a power of two of elements from {turbo.LEAST_SIZE} to {turbo.LARGEST_SIZE}."
        )
    expected = (*words.shape[:3], 1)
    if norms.shape != expected or norms.dtype != mx.float32:
        raise ValueError(
            f"[{op}] {name} norms are {arguments.found(norms)}, expected float32 {expected}."
        )
    return TurboRows(words, norms, bits)


def _packed_rows(op: str, name: str, rows: Packed, bits: int, group_size: int) -> QuantizedRows:
    """Check that words, scales and biases make rows [B, Hkv, N, D] together."""
    arrays = []
    for part, array in zip(("words", "scales", "biases"), rows, strict=True):
        found = arguments.array(op, f"{name} {part}", array)
        arguments.dimensions(op, f"{name} {part}", found.shape, "[B, Hkv, N, ...]")
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


def check_together(
    op: str, queries: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]
) -> None:
    """Whether the sizes of queries, keys and values, packed or not, fit each other."""
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


def quantized_rows(
    op: str,
    queries: mx.array,
    keys: Sequence[Any],
    values: Sequence[Any],
    bits: int,
    v_bits: int | None,
    group_size: int,
) -> tuple[StoredRows, StoredRows]:
    """Check packed keys and values, and that they fit the queries."""
    arguments.dimensions(op, "queries", queries.shape, "[B, Hq, Lq, D]")
    arguments.not_empty(op, "queries", queries.shape, "[B, Hq, Lq, D]")
    arguments.floats(op, "queries", queries.dtype)
    bits, v_bits, group_size = arguments.packing(op, bits, v_bits, group_size)
    k = _stored_rows(op, "key", keys, bits, group_size)
    v = _stored_rows(op, "value", values, v_bits, group_size)
    check_together(op, queries.shape, k.shape, v.shape)
    if isinstance(v, mx.array):
        raise ValueError(f"[{op}] values are one array, expected them packed.")
    if isinstance(k, mx.array) and k.dtype != queries.dtype:
        raise ValueError(
            f"[{op}] queries and keys are {dtype_name(queries.dtype)} and {dtype_name(k.dtype)}, "
            "expected the same dtype."
        )
    affine = [rows for rows in (k, v) if isinstance(rows, QuantizedRows)]
    if len({rows.scales.dtype for rows in affine}) > 1:
        raise ValueError(
            f"[{op}] key scales and value scales are {dtype_name(affine[0].scales.dtype)} and "
            f"{dtype_name(affine[1].scales.dtype)}, expected the same dtype."
        )
    return k, v


def packed_pair(op: str, keys: Any, values: Any) -> tuple[Any, Any]:
    """Keys and values that are both packed, as tuples, or both not; ``mx.quantize`` makes lists."""
    keys, values = (
        tuple(rows) if isinstance(rows, list) and len(rows) == 3 else rows
        for rows in (keys, values)
    )
    if isinstance(keys, tuple) != isinstance(values, tuple):
        raise TypeError(
            f"[{op}] keys and values are {type(keys).__name__} and {type(values).__name__}, "
            "expected two arrays, or two tuples of words, scales and biases."
        )
    return keys, values
