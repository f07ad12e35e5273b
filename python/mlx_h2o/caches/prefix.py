"""Rows that sequences share: those of the first tokens, kept once and never changed.

A table that stands on a prefix holds the later rows. Attention reads both, and merges the outputs
by the shares that they have in the common softmax.
"""

from __future__ import annotations

import mlx.core as mx

from ..config import H2OConfig
from ..operations.segments import Rows
from .column import Column, Parts, packing_of
from .frame import Frame, as_they_came


class Prefix:
    """The first rows of one layer, of any number of sequences. Nothing is evaluated.

    Args:
        keys: a column of rows [1, H, rows, D], and none behind them.
        values: of rows [1, H, rows, Dv].
        sparse_v: as of ``H2OConfig``.
        frame: what the rows are kept relative to, these and those that stand on them.

    Attributes:
        rows: how many.
        state: keys and values as they are kept: other array objects than the columns', made once.
    """

    def __init__(
        self, keys: Column, values: Column, sparse_v: float, frame: Frame | None = None
    ) -> None:
        self._columns, self._frame = (keys, values), frame
        self.rows: int = keys.parts[0].shape[2]
        self.nbytes = keys.nbytes + values.nbytes
        self.state: tuple[Parts, Parts] = keys.view(self.rows), values.view(self.rows)
        self._settings = packing_of(keys, values, sparse_v)

    def as_rows(self, framed: bool) -> Rows:
        """What attention reads beside rows in their frame, or beside those as they came."""
        if self._frame is not None and not framed:
            keys, values = self._as_they_came()
            return Rows(keys, values, {})
        pairs = zip(self._columns, self.state, strict=True)
        keys, values = (column.given(parts, as_array=False) for column, parts in pairs)
        return Rows(keys, values, self._settings)

    def _as_they_came(self) -> list[mx.array]:
        given = zip(self._columns, self.state, ("keys", "values"), strict=True)
        return [
            as_they_came(self._frame, column.decode(parts), side) for column, parts, side in given
        ]

    def before(
        self, keys: mx.array, values: mx.array, mask: mx.array | str | None
    ) -> tuple[mx.array, mx.array, mx.array | str | None]:
        """These rows and then own ones as arrays [B, H, rows + N, ...], which live no longer than
        the attention of a chunk needs them, and the mask of the own ones for all."""
        pairs = zip(self._as_they_came(), (keys, values), strict=True)
        first = tuple(rows.astype(own.dtype) for rows, own in pairs)
        if isinstance(mask, mx.array):
            mask = mx.broadcast_to(mask, (*mask.shape[:-1], keys.shape[2]))
            fill = mx.array(True) if mask.dtype == mx.bool_ else mx.array(0, mask.dtype)
            seen = mx.broadcast_to(fill, (*mask.shape[:-1], self.rows))
            mask = mx.concatenate([seen, mask], axis=-1)
        both, others = behind(first, (keys, values))
        return both, others, mask

    def beside(self, own: mx.array, first: float) -> mx.array:
        """What goes with own rows [B, H, N], and ``first`` in the place of these."""
        return behind((mx.full((1, 1, self.rows), first, own.dtype),), (own,))[0]

    def positions(self, own: mx.array) -> mx.array:
        """Those of own rows, int32 [B, H, N], and before them those of these."""
        return behind((mx.arange(self.rows, dtype=mx.int32)[None, None],), (own,))[0]


def unshareable(config: H2OConfig) -> str:
    """What of these settings forbids that rows are shared; empty where nothing does."""
    if config.mixed:
        return "mixed precision, whose rows change"
    if config.speculative:
        return "speculation"
    return "the latent rows of MLA" if config.kv_handed == "latents" else ""


def behind(first: Parts, own: Parts) -> Parts:
    """``own`` arrays [B, H, N, ...] behind the first ones, the same in every sequence."""
    pairs = zip(first, own, strict=True)
    return tuple(
        mx.concatenate([mx.broadcast_to(a, (*b.shape[:2], *a.shape[2:])), b], axis=2)
        for a, b in pairs
    )
