"""TurboQuant: rows as codes of rotated directions and norms, as ``composed.turbo`` makes them."""

import mlx.core as mx

from ..operations.arguments import CODE_SIZES, codes_fit
from ..operations.backends import resolve
from ..operations.composed.turbo import KEYS as KEYS
from ..operations.composed.turbo import VALUES as VALUES
from .column import Column, Parts


class TurboColumn(Column):
    """``parts`` are words and norms; ``seed`` differs for keys and values, and ``dtype`` is that of
    arriving rows, which codes do not show."""

    bits: int

    def __init__(self, bits: int, seed: int, dtype: mx.Dtype) -> None:
        self.bits = bits
        self.seed = seed
        self.dtype = dtype

    def encode(self, rows: mx.array) -> Parts:
        return resolve().encode_rows(rows, self.bits, self.seed)

    def decode(self, parts: Parts) -> mx.array:
        words, norms = parts
        return resolve().decode_rows(words, norms, self.bits, self.seed, self.dtype)


def check_size(kv_format: str | None, side: str, size: int, owner: str) -> None:
    """Raises ValueError, naming ``owner``, for keys or values of a size that codes do not
    support."""
    if not codes_fit(size):
        raise ValueError(
            f"[H2OKVCache] {owner} has {side} of {size} elements, and kv_format is {kv_format!r}: "
            f"expected a power of two from {CODE_SIZES[0]} to {CODE_SIZES[1]}, or kv_bits."
        )
