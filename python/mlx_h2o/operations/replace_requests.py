"""Checks of ``replace_worst``."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.arguments import FLOATS, StreamLike, dtype_name
from mlx_h2o.operations.arguments import found as _found
from mlx_h2o.operations.requests import Packed, PerSequence, RankName, ReplaceRequest

_OP = "replace_worst"
_LAST_POSITION = 2**30 - 1
_RANK_NAMES = ("importance", "age", "key_diversity")


def replace_request(
    keys: mx.array | Packed,
    values: mx.array | Packed,
    importance: mx.array,
    positions: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    *,
    position: PerSequence,
    sink_size: int = 0,
    recent_start: PerSequence | None = None,
    ranks: mx.array | RankName | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    stream: StreamLike = None,
) -> ReplaceRequest:
    """Check the arguments of ``replace_worst``."""
    bits, value_bits, group_size = arguments.packing(_OP, bits, v_bits, group_size)
    keys, values = as_packed(keys), as_packed(values)
    if isinstance(keys, tuple) != isinstance(values, tuple):
        raise TypeError(
            f"[{_OP}] keys and values are {type(keys).__name__} and {type(values).__name__}, "
            "expected two arrays, or two tuples of words, scales and biases."
        )
    stored = _layout("keys", keys, new_keys, bits, group_size)
    stored_values = _layout("values", values, new_values, value_bits, group_size)
    rows = stored.rows
    if stored_values.rows != rows:
        raise ValueError(
            f"[{_OP}] keys and values have shapes {(*rows, stored.width)} and "
            f"{(*stored_values.rows, stored_values.width)}, expected the same [B, H, N]."
        )
    by = "importance" if ranks is None else ranks
    per_row = [("importance", importance, mx.float32), ("positions", positions, mx.int32)]
    if not isinstance(by, str):
        per_row.append(("ranks", by, mx.float32))
    elif by not in _RANK_NAMES:
        raise ValueError(
            f"[{_OP}] ranks are {by!r}, expected an array, None or one of {_RANK_NAMES}."
        )
    for name, array, dtype in per_row:
        _check(name, array, rows, dtype, "[B, H, N]")
    _check_new("keys", new_keys, stored)
    _check_new("values", new_values, stored_values)
    position = arguments.per_sequence(_OP, "position", position, rows[0])
    if isinstance(position, int) and not 0 <= position <= _LAST_POSITION:
        raise ValueError(f"[{_OP}] position is {position}, expected 0 to 2**30 - 1.")
    zones = arguments.zones(_OP, sink_size, recent_start, rows[0])
    return ReplaceRequest(
        keys, values, importance, positions, new_keys, new_values, position, *zones, by,
        arguments.stream(_OP, stream), bits, value_bits, group_size,
    )  # fmt: skip


def as_packed(rows: Any) -> Any:
    """``mx.quantize`` returns a list, where the operations write of a tuple."""
    return tuple(rows) if isinstance(rows, list) and len(rows) == 3 else rows


def _check(
    name: str, array: object, shape: tuple[int, ...], dtype: mx.Dtype, layout: str
) -> mx.array:
    found = arguments.array(_OP, name, array)
    if found.shape != shape or found.dtype != dtype:
        raise ValueError(
            f"[{_OP}] {name} are {_found(found)}, expected {dtype_name(dtype)} {layout} = {shape}."
        )
    return found


class _Layout(NamedTuple):
    """Of stored rows, packed or not: [B, H, N], row size and the dtype of new rows."""

    rows: tuple[int, int, int]
    width: int
    dtype: mx.Dtype


def _layout(name: str, stored: object, new: object, bits: int, group_size: int) -> _Layout:
    if isinstance(stored, tuple):
        return _packed_layout(name, stored, new, bits, group_size)
    array = arguments.array(_OP, name, stored)
    if array.ndim != 4 or 0 in array.shape or array.dtype not in FLOATS:
        raise ValueError(
            f"[{_OP}] {name} are {_found(array)}, expected float32, float16 or bfloat16 "
            "with 4 dimensions, every size at least 1."
        )
    batch, heads, rows, width = array.shape
    return _Layout((batch, heads, rows), width, array.dtype)


def _packed_layout(
    name: str, stored: tuple[object, ...], new: object, bits: int, group_size: int
) -> _Layout:
    if len(stored) != 3:
        raise TypeError(f"[{_OP}] {name} must be a tuple of words, scales and biases.")
    words, scales, biases = (
        arguments.array(_OP, f"{part} of the {name}", array)
        for part, array in zip(("words", "scales", "biases"), stored, strict=True)
    )
    dtype = arguments.array(_OP, f"new_{name}", new).dtype
    if words.ndim != 4 or 0 in words.shape or words.dtype != mx.uint32:
        raise ValueError(
            f"[{_OP}] words of the {name} are {_found(words)}, expected uint32 "
            "[B, H, N, D * bits / 32], every size at least 1."
        )
    batch, heads, rows, packed = words.shape
    width = packed * 32 // bits
    if packed * 32 % bits or width % group_size:
        raise ValueError(
            f"[{_OP}] words of the {name} have {packed} words per row, which at {bits} bits is "
            f"not a multiple of the group size {group_size}."
        )
    expected = (batch, heads, rows, width // group_size)
    for part, array in (("scales", scales), ("biases", biases)):
        if array.shape != expected or array.dtype != dtype or array.dtype not in FLOATS:
            raise ValueError(
                f"[{_OP}] {part} of the {name} are {_found(array)}, "
                f"expected {expected} in the dtype of the new rows, {dtype_name(dtype)}."
            )
    return _Layout((batch, heads, rows), width, dtype)


def _check_new(name: str, new: object, stored: _Layout) -> None:
    row = arguments.array(_OP, f"new_{name}", new)
    expected = (*stored.rows[:2], 1, stored.width)
    if row.shape != expected or row.dtype != stored.dtype:
        raise ValueError(
            f"[{_OP}] new {name} are {_found(row)}, expected "
            f"{dtype_name(stored.dtype)} {expected} as the {name}."
        )
