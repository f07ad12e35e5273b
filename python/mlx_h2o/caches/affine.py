"""Quantised rows: codes of 2 to 8 bits with a scale and a bias per group, as ``mx.quantize`` makes.

A row is quantised once, when it comes, and moved as it is packed.
"""

from __future__ import annotations

import warnings

import mlx.core as mx

from ..operations.validate_quantized import GROUP_SIZES
from .column import Column, Parts

__all__ = ["AffineColumn", "group_size_for"]

_BLOCK = 256
"""Rows that are unpacked at a time where MLX would need much memory for all at once."""

_warned: set[tuple[int, int, int]] = set()


class AffineColumn(Column):
    """``parts`` are words, scales and biases."""

    bits: int
    group_size: int

    def __init__(self, bits: int, group_size: int, parts: Parts = ()) -> None:
        super().__init__(parts)
        self.bits = bits
        self.group_size = group_size

    def encode(self, rows: mx.array) -> Parts:
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))

    def decode(self, parts: Parts) -> mx.array:
        """In blocks on a CPU, where MLX composes this of float32 five times as large."""
        words, scales, _ = parts
        count, half = words.shape[2], scales.dtype != mx.float32
        if count == 0:  # MLX refuses none
            return mx.zeros((*scales.shape[:3], scales.shape[3] * self.group_size), scales.dtype)
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        if on_gpu:
            # MLX has dequantised views of a larger buffer wrongly on some GPUs.
            parts = tuple(mx.contiguous(part) for part in parts)
        if not half or count <= _BLOCK or on_gpu:
            return self._unpacked(parts)
        blocks: list[mx.array] = []
        for start in range(0, count, _BLOCK):
            words, scales, biases = (part[:, :, start : start + _BLOCK] for part in parts)
            if blocks:  # without an order MLX may begin many blocks before it ends the first
                words = mx.depends(words, [blocks[-1]])
            blocks.append(self._unpacked((words, scales, biases)))
        return mx.concatenate(blocks, axis=2)

    def _unpacked(self, parts: Parts) -> mx.array:
        words, scales, biases = parts
        return mx.dequantize(words, scales, biases, group_size=self.group_size, bits=self.bits)

    def like(self, parts: Parts) -> AffineColumn:
        return AffineColumn(self.bits, self.group_size, parts)

    @property
    def layout(self) -> tuple[int, int, int, mx.Dtype]:
        batch, heads, _, groups = self.parts[1].shape
        return batch, heads, groups * self.group_size, self.parts[1].dtype


def group_size_for(wanted: int, width: int, value_width: int, owner: str) -> int:
    """``wanted``, or 32 for rows that it does not divide, which is said once.

    Raises ValueError, naming ``owner``, where 32 does not divide them either.
    """
    if width % wanted == 0 == value_width % wanted:
        return wanted
    least = min(GROUP_SIZES)
    found = (
        f"[QuantizedH2OKVCache] {owner} has keys of {width} and values of {value_width} elements, "
        f"which "
    )
    if width % least or value_width % least:
        raise ValueError(
            f"{found}neither kv_group_size = {wanted} nor {least} divides: expected multiples of "
            f"{least}, or kv_bits=None."
        )
    if (wanted, width, value_width) not in _warned:
        _warned.add((wanted, width, value_width))
        message = f"kv_group_size = {wanted} does not divide: groups of {least} are used."
        warnings.warn(found + message, stacklevel=2)
    return least
