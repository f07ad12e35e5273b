"""What is there of a cache's rows, for those who look."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import mlx.core as mx

from . import formats
from .prefix import Prefix
from .table import Table

IMPORTANCE = "importance"
"""Beside the rows: what the policy accumulated."""
BIAS = "bias"
"""Beside the rows, once some have been folded: ``ln n`` of the n rows that each stands for."""


def stored_rows(side: str) -> Any:
    """The property ``side``, read by ``_stored(side)`` and set by ``_set(side, rows)``."""
    doc = f"""The stored {side} [B, H, N, size], or None. May be set to others of the same shape.

    Where rows are quantised: their words, scales and biases.
    """
    return property(lambda own: own._stored(side), lambda own, rows: own._set(side, rows), doc=doc)


class StoredRows(ABC):
    """Rows of one layer; nothing here says which they are."""

    _table: Table | None
    """Its own rows; None until a token has been seen."""
    _prefix: Prefix | None = None
    """The rows before them, which others stand on too."""
    _tokens: list[int]
    """Of each line, those seen."""
    keys, values = stored_rows("keys"), stored_rows("values")

    @abstractmethod
    def _at_rest(self) -> Table | None:
        """Its own rows, without what waits to go and has been attended to."""

    @property
    def _whole(self) -> Table | None:
        """All rows; those of a prefix once for each sequence."""
        if self._prefix is None or self._table is None:
            return self._table
        return self._prefix.whole(self._table, self._tokens)

    def _stored(self, side: str) -> Any:
        table = self._whole
        return None if table is None else formats.stored(table, side)

    def _set(self, side: str, rows: Any) -> None:
        if self._table is None:
            raise ValueError(f"[H2OKVCache.{side}] an array was set, but no rows are stored.")
        formats.set_rows(self._table, side, rows)

    @property
    def scores(self) -> mx.array | None:
        """float32 [B, H, N]: what the policy accumulated for each row, NaN where nothing yet."""
        table = self._whole
        return None if table is None else self._scores_of(table)

    def _scores_of(self, table: Table) -> mx.array:
        if IMPORTANCE in table.beside:
            return table.beside[IMPORTANCE][:, :, : table.width]
        return mx.full((*table.shape, table.width), mx.nan, mx.float32)

    @property
    def row_bias(self) -> mx.array | None:
        """float32 [B, H, at least N]: what attention adds to the logits of rows that others were
        folded into; None while there are none."""
        return None if self._table is None else self._table.beside.get(BIAS)

    @property
    def positions(self) -> mx.array | None:
        """int32 [B, H, N]: the place of each stored row in the sequence, -1 where there is none."""
        table = self._whole
        return None if table is None else table.positions(self._tokens)

    @property
    def prefix_rows(self) -> int:
        """Rows per head that it shares, the first ones."""
        return 0 if self._prefix is None else self._prefix.rows

    @property
    def evicted(self) -> int:
        """Rows per head that have gone, of all sequences."""
        if self._table is None:
            return 0
        seen = sum(self._tokens) - self.prefix_rows * len(self._tokens)
        return seen - sum(self._table.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of every array stored: keys, values, scores, positions, and room for more.

        The surplus of a chunk goes first, as in ``flush``, unless its scores are still to come.
        Shared rows count once for all sequences of a cache, and again in each cache."""
        self._at_rest()
        return self.held_nbytes

    @property
    def held_nbytes(self) -> int:
        """The same with the surplus of a chunk, as long as it is there."""
        shared = 0 if self._prefix is None else self._prefix.nbytes
        return shared + (0 if self._table is None else self._table.nbytes)

    def size(self) -> int:
        """Rows stored per head, shared ones included. The surplus goes first, as in ``nbytes``."""
        table = self._at_rest()
        return 0 if table is None else max(table.lengths, default=0) + self.prefix_rows

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self._table is None
