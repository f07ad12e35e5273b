"""random: a random sample of all rows seen, as a control for comparisons."""

from dataclasses import dataclass

import mlx.core as mx

from ..errors import check_int
from .base import Policy, Rows


@dataclass(frozen=True)
class Random(Policy):
    """Ranks rows by a hash of their position, KV head and ``random_seed``.

    So the unprotected rows are always a uniform sample of all rows seen, the same in every run and
    in batches.
    """

    name = "random"

    random_seed: int = 0

    def __post_init__(self) -> None:
        check_int("H2OConfig", "random_seed", self.random_seed, 0, most=2**64 - 1)

    def rank(self, rows: Rows) -> mx.array:
        heads = mx.arange(rows.positions.shape[1], dtype=mx.uint32)[:, None]
        salt = mx.array(self.random_seed % 2**32, mx.uint32)
        mixed = _mixed(_mixed(_mixed(salt) ^ heads) ^ rows.positions.astype(mx.uint32))
        # The upper 24 bits, which float32 holds exactly.
        return (mixed >> mx.array(8, mx.uint32)).astype(mx.float32) / 2**24


def _mixed(bits: mx.array) -> mx.array:
    """The finaliser of MurmurHash3: every bit of the input changes half of the output."""
    bits = bits + mx.array(0x9E3779B9, mx.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> mx.array(shift, mx.uint32))) * mx.array(factor, mx.uint32)
    return bits ^ (bits >> mx.array(16, mx.uint32))
