"""The reference of quantised caches: rows that went through quantisation once, kept dense."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache


class DequantisedCache(KVCache):
    """mlx_lm's KVCache, whose rows are what quantising and dequantising them gives.

    Latents (MLA): the values, which are rotary parts of the keys, stay as they come.
    """

    def __init__(self, bits: int, group_size: int, *, latents: bool) -> None:
        super().__init__()
        self._bits = bits
        self._group_size = group_size
        self._latents = latents

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        values = values if self._latents else self._rounded(values)
        return super().update_and_fetch(self._rounded(keys), values)

    def _rounded(self, rows: mx.array) -> mx.array:
        group_size = next((g for g in (self._group_size, 32) if rows.shape[-1] % g == 0), 0)
        if not group_size:
            return rows
        packed = mx.quantize(rows, group_size=group_size, bits=self._bits)
        return mx.dequantize(*packed, group_size=group_size, bits=self._bits)
