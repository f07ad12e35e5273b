"""What back ends receive of a replacement in a cache of mixed precision."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_h2o.operations.arguments import StreamLike
from mlx_h2o.operations.replace_requests import Packed, Statistics

__all__ = ["TierRequest", "TierRows"]


class TierRows(NamedTuple):
    """The packed rows of one tier [B, H, n, ...], and the bits of each element."""

    keys: Packed
    values: Packed
    bits: int
    v_bits: int


class TierRequest(NamedTuple):
    """One new row where the newest rows are dense and the others packed in one tier or two.

    Slots are those of the tiers in order, then of the newest rows, in order of position.

    tiers: one, or a heavy and a light one, whose rows have fewer bits.
    keys: [B, H, newest, D], ``values`` the same with Dv.
    importance: float32 [B, H, N]; ``positions`` int32.
    ranks: float32 [B, H, N]; None: the importance.
    statistics: as of ``key_statistics``, to be kept up to date; a back end may leave them.
    """

    tiers: tuple[TierRows, ...]
    keys: mx.array
    values: mx.array
    importance: mx.array
    positions: mx.array
    new_keys: mx.array
    new_values: mx.array
    position: int
    sink_size: int
    recent_start: int
    group_size: int
    ranks: mx.array | None = None
    statistics: Statistics | None = None
    stream: StreamLike = None
