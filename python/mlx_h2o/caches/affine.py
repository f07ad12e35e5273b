"""Quantised rows: codes of 2 to 8 bits with a scale and a bias per group, from ``mx.quantize``."""

import warnings
from collections.abc import Sequence

import mlx.core as mx

from ..operations.arguments import GROUP_SIZES
from ..operations.backends import resolve
from .column import Column, Parts

_warned: set[tuple[int, ...]] = set()


class AffineColumn(Column):
    """``parts`` are words, scales and biases."""

    bits: int
    group_size: int

    def __init__(self, bits: int, group_size: int) -> None:
        self.bits = bits
        self.group_size = group_size

    def encode(self, rows: mx.array) -> Parts:
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))

    def decode(self, parts: Parts) -> mx.array:
        words, scales, biases = parts
        width = scales.shape[3] * self.group_size
        none = mx.zeros((*scales.shape[:2], 0, width), scales.dtype)
        if mx.default_device().type != mx.DeviceType.gpu:
            # MLX would make float32 temporaries five times as large as float16 rows.
            return resolve().segment_rows([*parts], none, [self.bits], self.group_size)[0]
        if words.shape[2] == 0:  # MLX refuses empty arrays
            return none
        # MLX has dequantised views of a larger buffer wrongly on some GPUs.
        words, scales, biases = (mx.contiguous(part) for part in parts)
        return mx.dequantize(words, scales, biases, group_size=self.group_size, bits=self.bits)


def group_size_for(wanted: int, sizes: Sequence[int], owner: str) -> int:
    """``wanted``, or 32 for rows of ``sizes`` that it does not divide, with a warning the first
    time. The first are those of keys, the last those of values.

    Raises ValueError, naming ``owner``, if 32 does not divide them either.
    """
    if not any(size % wanted for size in sizes):
        return wanted
    least = min(GROUP_SIZES)
    found = (
        f"[QuantizedH2OKVCache] {owner} has keys of {sizes[0]} and values of {sizes[-1]} elements, "
        f"which "
    )
    if any(size % least for size in sizes):
        raise ValueError(
            f"{found}neither kv_group_size = {wanted} nor {least} divides: expected multiples of "
            f"{least}, or kv_bits=None."
        )
    if (wanted, *sizes) not in _warned:
        _warned.add((wanted, *sizes))
        message = f"kv_group_size = {wanted} does not divide: groups of {least} are used."
        warnings.warn(found + message, stacklevel=2)
    return least
