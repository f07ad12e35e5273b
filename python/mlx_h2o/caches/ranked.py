"""The rows of a table that a policy ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from ..operations.requests import PerSequence
from .attention import true_rows
from .stored import BIAS, IMPORTANCE
from .table import Table


@dataclass
class Ranked:
    """``Rows``: rows of some lines of a table from slot ``skip`` on, read only as far as someone
    asks, and once."""

    table: Table
    positions: mx.array
    offset: int
    lines: mx.array | None
    skip: int
    keep: int
    places: int
    sink_size: int
    recent_start: PerSequence

    def _some(self, array: mx.array) -> mx.array:
        end = self.skip + self.positions.shape[2]
        whole = not self.skip and array.shape[2] == end
        array = array if whole else array[:, :, self.skip : end]
        return array if self.lines is None else array[self.lines]

    @cached_property
    def keys(self) -> mx.array:
        return self._some(true_rows(self.table, "keys"))

    @cached_property
    def values(self) -> mx.array:
        return self._some(true_rows(self.table, "values"))

    @property
    def importance(self) -> mx.array:
        return self._beside(IMPORTANCE, mx.nan)

    @property
    def bias(self) -> mx.array:
        """float32 [B, H, N]: ``ln n`` of the rows that each stands for."""
        return self._beside(BIAS, 0.0)

    def _beside(self, name: str, fill: float) -> mx.array:
        found = self.table.beside.get(name)
        if found is None:
            return mx.full(self.positions.shape, fill, mx.float32)
        return self._some(found)
