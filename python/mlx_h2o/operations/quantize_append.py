"""Quantisation of new rows straight into their slots; re-exported by ``fast``."""

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.arguments import FLOATS, StreamLike, dtype_name
from mlx_h2o.operations.backends import serve
from mlx_h2o.operations.composed import rows as composed_cache
from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.requests import Parts, QuantizeAppendRequest

_OP = "quantize_append"


def quantize_append(
    quantised_keys: Parts,
    quantised_values: Parts,
    new_keys: mx.array,
    new_values: mx.array,
    slots: mx.array,
    *,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    stream: StreamLike = None,
) -> tuple[Parts, Parts]:
    """Quantise new rows of K and V straight into their slots.

    Keys and values are each stored in a way of their own, which the number of arrays tells:

    - three, words, scales and biases: the packed rows equal ``mx.quantize`` on the same device bit
      for bit (affine mode; Metal and the CPU round differently);
    - two, words and norms: codes of rotated rows (``kv_format="turbo3"``; docs/design.md). A code
      may be the next one where an element lies at the mean of two levels as closely as float32
      tells;
    - one: the rows as they come.

    Args:
        quantised_keys: words uint32 [B, H, N, D * bits / 32], scales and biases
            [B, H, N, D / group_size]; or words and norms, float32 [B, H, N, 1]; or ``(keys,)``,
            [B, H, N, D].
        quantised_values: the same with Dv and ``v_bits``.
        new_keys: [B, H, L, D], float32, float16 or bfloat16: the dtype of the scales, or of keys
            that stay as they come.
        new_values: [B, H, L, Dv], the same of the values.
        slots: uint32 [B, H, L], the rows to write, distinct within a head; one beyond the last
            row means the last row.
        bits: 2, 3, 4, 5, 6 or 8; of codes 2, 3 or 4.
        group_size: 32, 64 or 128, which divides D and Dv. Of codes it means nothing, and the rows
            have a power of two of elements from 32 to 1,024.
        v_bits: those of the values; None: ``bits``.
        stream: stream or device to run on.

    Returns:
        Keys and values, each in as many arrays as they came. Evaluating the first array of the keys
        evaluates all. The arrays that were passed never change; where nothing else holds them,
        their memory may be used.

    Raises:
        ValueError: shapes, dtypes or numbers other than these.
        TypeError: an argument that is not an array or an integer where one is expected.
    """
    bits, v_bits, group_size = arguments.packing(_OP, bits, v_bits, group_size)
    new_rows = _check_new_rows(new_keys, new_values)
    stored_keys = _checked("keys", quantised_keys, new_keys, bits, group_size)
    stored_values = _checked("values", quantised_values, new_values, v_bits, group_size)
    counts = stored_keys[0].shape[2], stored_values[0].shape[2]
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
    return serve(
        composed_cache.quantize_append,
        QuantizeAppendRequest(
            stored_keys, stored_values, new_keys, new_values, slots, bits, group_size, v_bits,
            place,
        ),
    )  # fmt: skip


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


Part = tuple[str, mx.Dtype, int]
"""What an array of stored rows is called, its dtype, and the size of its last axis."""


def _checked(name: str, stored: Parts, new: mx.array, bits: int, group_size: int) -> Parts:
    """The arrays, which fit each other and the new rows; ``mx.quantize`` returns a list."""
    if not isinstance(stored, tuple | list) or not 1 <= len(stored) <= 3:
        raise TypeError(
            f"[{_OP}] quantised {name} must be a tuple of words, scales and biases, of words and "
            "norms, or of the rows alone."
        )
    batch, heads, *_ = new.shape
    first = stored[0]
    rows = first.shape[2] if isinstance(first, mx.array) and first.ndim == 4 else 0
    expected = _layout(name, len(stored), new, bits, group_size)
    for (part, dtype, last), array in zip(expected, stored, strict=True):
        array = arguments.array(_OP, f"{part} of the {name}", array)
        if array.shape != (batch, heads, rows, last) or array.dtype != dtype or rows == 0:
            raise ValueError(
                f"[{_OP}] {part} of the {name} are {dtype_name(array.dtype)} {array.shape}, "
                f"expected {dtype_name(dtype)} ({batch}, {heads}, N, {last}), N at least 1."
            )
    return tuple(stored)


def _layout(name: str, count: int, new: mx.array, bits: int, group_size: int) -> list[Part]:
    """Of rows like the new ones, stored in so many arrays."""
    width = int(new.shape[3])
    words = ("words", mx.uint32, width * bits // 32)
    if count == 1:
        return [("rows", new.dtype, width)]
    if count == 2:
        if bits not in turbo.BITS or not turbo.serves(width):
            raise ValueError(
                f"[{_OP}] rows of the {name} have {width} elements and codes of {bits} bits, "
                f"expected a power of two from {turbo.LEAST_SIZE} to {turbo.LARGEST_SIZE}, and "
                "2, 3 or 4 bits."
            )
        return [words, ("norms", mx.float32, 1)]
    if width % group_size:
        raise ValueError(
            f"[{_OP}] rows of the {name} have {width} elements, "
            f"expected a multiple of group_size = {group_size}."
        )
    groups = width // group_size
    return [words, ("scales", new.dtype, groups), ("biases", new.dtype, groups)]
