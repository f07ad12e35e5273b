"""Quantisation of new rows straight into their slots; re-exported by ``fast``."""

import mlx.core as mx

from mlx_h2o.operations import arguments, composed_cache
from mlx_h2o.operations.arguments import FLOATS, StreamLike, dtype_name
from mlx_h2o.operations.backends import serve
from mlx_h2o.operations.requests import Packed, QuantizeAppendRequest

_OP = "quantize_append"
_PARTS = ("words", "scales", "biases")


def quantize_append(
    quantised_keys: Packed,
    quantised_values: Packed,
    new_keys: mx.array,
    new_values: mx.array,
    slots: mx.array,
    *,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    stream: StreamLike = None,
) -> tuple[Packed, Packed]:
    """Quantise new rows of K and V straight into their slots.

    The packed rows equal ``mx.quantize`` on the same device bit for bit (affine mode; Metal and
    the CPU round differently).

    Args:
        quantised_keys: words uint32 [B, H, N, D * bits / 32], scales and biases
            [B, H, N, D / group_size].
        quantised_values: the same with Dv and ``v_bits``.
        new_keys: [B, H, L, D], the dtype of the scales: float32, float16 or bfloat16.
        new_values: [B, H, L, Dv], the dtype of the values' scales.
        slots: uint32 [B, H, L], the rows to write, distinct within a head; one beyond the last
            row means the last row.
        bits: 2, 3, 4, 5, 6 or 8.
        group_size: 32, 64 or 128; D and Dv are multiples of it.
        v_bits: those of the values; None: ``bits``.
        stream: stream or device to run on.

    Returns:
        Keys and values, each words, scales and biases. Evaluating the words of the keys evaluates
        all six. The arrays that were passed never change; where nothing else holds them, their
        memory may be used.

    Raises:
        ValueError: shapes, dtypes or numbers other than these.
        TypeError: an argument that is not an array or an integer where one is expected.
    """
    bits, value_bits, group_size = arguments.packing(_OP, bits, v_bits, group_size)
    new_rows = _check_new_rows(new_keys, new_values)
    counts = [
        _check_packed("keys", quantised_keys, new_keys, bits, group_size),
        _check_packed("values", quantised_values, new_values, value_bits, group_size),
    ]
    if counts[0] != counts[1]:
        raise ValueError(
            f"[{_OP}] keys and values have {counts[0]} and {counts[1]} rows, expected the same."
        )
    slots = arguments.array(_OP, "slots", slots)
    if slots.shape != new_rows or slots.dtype != mx.uint32:
        raise ValueError(
            f"[{_OP}] slots are {dtype_name(slots.dtype)} {slots.shape}, "
            f"expected uint32 [B, H, L] = {new_rows}."
        )
    place = arguments.stream(_OP, stream)
    stored_keys, stored_values = _three(quantised_keys), _three(quantised_values)
    return serve(
        composed_cache.quantize_append,
        QuantizeAppendRequest(
            stored_keys, stored_values, new_keys, new_values, slots, bits, group_size, value_bits,
            place,
        ),
    )  # fmt: skip


def _three(packed: Packed) -> Packed:
    """``mx.quantize`` returns a list."""
    words, scales, biases = packed
    return words, scales, biases


def _check_new_rows(new_keys: mx.array, new_values: mx.array) -> tuple[int, ...]:
    for name, new in (("keys", new_keys), ("values", new_values)):
        new = arguments.array(_OP, f"new_{name}", new)
        if new.ndim != 4 or 0 in new.shape or new.dtype not in FLOATS:
            raise ValueError(
                f"[{_OP}] new {name} are {dtype_name(new.dtype)} {new.shape}, expected float32, "
                "float16 or bfloat16 [B, H, L, D], every size at least 1."
            )
    if new_keys.shape[:3] != new_values.shape[:3]:
        raise ValueError(
            f"[{_OP}] new keys and values have shapes {new_keys.shape} and {new_values.shape}, "
            "expected the same [B, H, L]."
        )
    return tuple(new_keys.shape[:3])


def _check_packed(name: str, packed: Packed, new: mx.array, bits: int, group_size: int) -> int:
    """The rows stored, of packed arrays that fit each other and the new rows."""
    if not isinstance(packed, tuple | list) or len(packed) != 3:
        raise TypeError(f"[{_OP}] quantised {name} must be a tuple of words, scales and biases.")
    batch, heads, _, width = new.shape
    if width % group_size:
        raise ValueError(
            f"[{_OP}] rows of the {name} have {width} elements, "
            f"expected a multiple of group_size = {group_size}."
        )
    words = arguments.array(_OP, f"words of the {name}", packed[0])
    rows = int(words.shape[2]) if words.ndim == 4 else 0
    groups = width // group_size
    for part, array, last in zip(_PARTS, packed, (width * bits // 32, groups, groups), strict=True):
        array = arguments.array(_OP, f"{part} of the {name}", array)
        dtype = mx.uint32 if part == "words" else new.dtype
        if array.shape != (batch, heads, rows, last) or array.dtype != dtype or rows == 0:
            raise ValueError(
                f"[{_OP}] {part} of the {name} are {dtype_name(array.dtype)} {array.shape}, "
                f"expected {dtype_name(dtype)} ({batch}, {heads}, N, {last}), N at least 1."
            )
    return rows
