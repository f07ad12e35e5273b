"""How rows are packed: bits of keys and of values, the size of a group, and the packing itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import mlx.core as mx

from ..config import H2OConfig
from ..operations.validate_quantized import GROUP_SIZES
from .storage import Layout, Packed

__all__ = ["Packing", "each", "triple", "unpack"]

_BLOCK = 256
"""Rows that are unpacked at a time where MLX would need much memory for all at once."""

_warned: set[tuple[int, int, int]] = set()


class Packing(NamedTuple):
    """``bits`` of keys and ``v_bits`` of values, a scale and a bias per ``group_size`` elements."""

    bits: int
    v_bits: int
    group_size: int

    @classmethod
    def of(cls, config: H2OConfig, keys: mx.array, values: mx.array, owner: str) -> Packing:
        """What ``config`` asks for, for rows of these widths.

        Widths that ``kv_group_size`` does not divide take groups of 32, which is said once.
        Raises ValueError, naming ``owner``, where 32 does not divide them either.
        """
        bits = cast(int, config.kv_bits)
        widths = keys.shape[-1], values.shape[-1]
        size = _group_size(config.kv_group_size, *widths, owner)
        return cls(bits, bits if config.v_bits is None else config.v_bits, size)

    @classmethod
    def tiers(
        cls, config: H2OConfig, keys: mx.array, values: mx.array, owner: str
    ) -> list[Packing]:
        """Those of mixed precision: of the heavy rows, and of the light ones where they differ."""
        heavy = cls.of(config, keys, values, owner)
        if config.light_bits is None:
            return [heavy]
        return [heavy, cls(config.light_bits, config.light_bits, heavy.group_size)]

    @classmethod
    def restored(cls, config: H2OConfig, keys: Packed) -> Packing:
        """How keys that ``config`` packed are packed: their own shapes tell the group size."""
        bits = cast(int, config.kv_bits)
        width, groups = keys[0].shape[-1] * 32 // bits, keys[1].shape[-1]
        return cls(bits, bits if config.v_bits is None else config.v_bits, width // groups)

    def packed(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Rows quantised: the one place where it happens beside ``fast.quantize_append``."""
        v, vs, vb = mx.quantize(values, group_size=self.group_size, bits=self.v_bits)
        return self.packed_keys(keys), (v, vs, vb)

    def packed_keys(self, keys: mx.array) -> Packed:
        """Keys quantised, where the values are not."""
        words, scales, biases = mx.quantize(keys, group_size=self.group_size, bits=self.bits)
        return words, scales, biases

    def unpacked(self, keys: Packed, values: Packed) -> tuple[mx.array, mx.array]:
        """Rows as numbers again, in the dtype of their scales."""
        return unpack(keys, self.bits, self.group_size), unpack(
            values, self.v_bits, self.group_size
        )

    def layouts(self, keys: Packed, values: Packed) -> tuple[Layout, Layout]:
        """Those of the rows that were packed."""
        return _layout(keys, self.group_size), _layout(values, self.group_size)


def triple(parts: Iterable[mx.array]) -> Packed:
    """Words, scales and biases, in this order."""
    words, scales, biases = parts
    return words, scales, biases


def each(change: Callable[[mx.array], mx.array], rows: Packed) -> Packed:
    """The rows whose three arrays are ``change`` of these."""
    return triple(change(part) for part in rows)


def _layout(rows: Packed, group_size: int) -> Layout:
    batch, heads, _, groups = rows[1].shape
    return Layout(batch, heads, groups * group_size, rows[1].dtype)


def unpack(rows: Packed, bits: int, group_size: int) -> mx.array:
    """Packed rows as numbers again, in the dtype of their scales."""
    words, scales, biases = rows
    count, half = words.shape[2], scales.dtype != mx.float32
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    if on_gpu:
        # MLX has dequantised views of a larger buffer wrongly on some GPUs.
        words, scales, biases = each(mx.contiguous, rows)
    if not half or count <= _BLOCK or on_gpu:
        return mx.dequantize(words, scales, biases, group_size=group_size, bits=bits)
    # On a CPU MLX composes this of operations in float32, five times as large as the result.
    parts: list[mx.array] = []
    for start in range(0, count, _BLOCK):
        some = slice(start, start + _BLOCK)
        block = words[:, :, some]
        if parts:  # without an order MLX may begin many blocks before it ends the first
            block = mx.depends(block, [parts[-1]])
        scale, bias = scales[:, :, some], biases[:, :, some]
        parts.append(mx.dequantize(block, scale, bias, group_size=group_size, bits=bits))
    return mx.concatenate(parts, axis=2)


def _group_size(wanted: int, width: int, value_width: int, owner: str) -> int:
    if width % wanted == 0 == value_width % wanted:
        return wanted
    least = min(GROUP_SIZES)
    if width % least or value_width % least:
        raise ValueError(
            f"[QuantizedH2OKVCache] {owner} has keys of {width} and values of {value_width} "
            f"elements, which neither kv_group_size = {wanted} nor {least} divides: expected "
            f"multiples of {least}, or kv_bits=None."
        )
    if (wanted, width, value_width) not in _warned:
        _warned.add((wanted, width, value_width))
        warnings.warn(
            f"[QuantizedH2OKVCache] {owner} has keys of {width} and values of {value_width} "
            f"elements, which kv_group_size = {wanted} does not divide: groups of {least} are "
            "used.",
            stacklevel=2,
        )
    return least
