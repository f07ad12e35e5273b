"""The reference of quantised caches: rows that were quantised and dequantised once, kept dense."""

import mlx.core as mx
from mlx_lm.models.cache import KVCache


class DequantisedCache(KVCache):
    """mlx_lm's KVCache, whose rows are what quantising and dequantising them gives.

    Latents (MLA): the values, which are rotary parts of the keys, stay as they come. More than
    ``packed`` new rows are read as they come.
    """

    def __init__(self, bits: int, group_size: int, *, latents: bool, packed: int) -> None:
        super().__init__()
        self._packed = packed
        self._bits = bits
        self._group_size = group_size
        self._latents = latents

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        kept = self._rounded(keys), values if self._latents else self._rounded(values)
        found = super().update_and_fetch(*kept)
        if (count := keys.shape[2]) <= self._packed:
            return found
        pairs = zip(found, (keys, values), strict=True)
        first, second = (mx.concatenate([old[:, :, :-count], new], axis=2) for old, new in pairs)
        return first, second

    def _rounded(self, rows: mx.array) -> mx.array:
        group_size = next((g for g in (self._group_size, 32) if rows.shape[-1] % g == 0), 0)
        if not group_size:
            return rows
        packed = mx.quantize(rows, group_size=group_size, bits=self._bits)
        return mx.dequantize(*packed, group_size=group_size, bits=self._bits)
