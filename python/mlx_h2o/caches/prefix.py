"""Rows that sequences share: those of the first tokens, kept once and never changed.

A cache that stands on a prefix holds its own rows, the later ones, in its table. Attention reads
both, and merges the outputs by the shares that they have in the common softmax.
"""

from __future__ import annotations

import mlx.core as mx

from ..config import H2OConfig
from ..operations.segments import Rows
from .attention import as_they_came, settings_of
from .column import Column, Parts
from .frame import Frame
from .table import Segment, Table


class Prefix:
    """The first rows of one layer, of any number of sequences. Nothing is evaluated.

    Args:
        keys: a column of rows [1, H, rows, D], and none behind them.
        values: of rows [1, H, rows, Dv].
        sparse_v: as of ``H2OConfig``.
        frame: what the rows are kept relative to, these and those that stand on them.

    Attributes:
        rows: how many.
    """

    def __init__(
        self, keys: Column, values: Column, sparse_v: float, frame: Frame | None = None
    ) -> None:
        self._columns = keys, values
        self._frame = frame
        self.rows: int = keys.parts[0].shape[2]
        self._settings = settings_of(keys, values, sparse_v)
        # What attention reads: other array objects than the columns', made once.
        self._parts = keys.view(self.rows), values.view(self.rows)

    @classmethod
    def taken_from(
        cls, table: Table, offset: int, rows: int, sparse_v: float
    ) -> tuple[Prefix, Table]:
        """The first ``rows``, in order, of a table of one line that has seen ``offset`` tokens, and
        a table of the others."""
        tail, width = table.tail, table.width
        keys, values = (
            column.each(lambda part: mx.contiguous(part[:, :, :rows]))
            for column in (tail.keys, tail.values)
        )
        own = table.each(lambda array: mx.contiguous(array[:, :, rows:width]), [width - rows])
        own.place(table.positions([offset])[:, :, rows:])
        own.frame = table.frame and table.frame.as_shared()
        return cls(keys, values, sparse_v, own.frame), own

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns)

    @property
    def state(self) -> tuple[Parts, Parts]:
        """Keys and values as they are kept."""
        return self._parts

    # Attention

    def as_rows(self, framed: bool) -> Rows:
        """What attention reads beside rows in their frame, or beside those as they came."""
        if self._frame is not None and not framed:
            keys, values = self._as_they_came()
            return Rows(keys, values, {})
        pairs = zip(self._columns, self._parts, strict=True)
        keys, values = (column.given(parts, as_array=False) for column, parts in pairs)
        return Rows(keys, values, self._settings)

    def _as_they_came(self) -> list[mx.array]:
        given = zip(self._columns, self._parts, ("keys", "values"), strict=True)
        return [
            as_they_came(self._frame, column.decode(parts), side) for column, parts, side in given
        ]

    def before(
        self, keys: mx.array, values: mx.array, mask: mx.array | str | None
    ) -> tuple[mx.array, mx.array, mx.array | str | None]:
        """These rows and then own ones as arrays [B, H, rows + N, ...], which live no longer than
        the attention of a chunk needs them, and the mask of the own ones for all."""
        pairs = zip(self._as_they_came(), (keys, values), strict=True)
        both = [_behind(first.astype(own.dtype), own) for first, own in pairs]
        if isinstance(mask, mx.array):
            mask = mx.broadcast_to(mask, (*mask.shape[:-1], keys.shape[2]))
            fill = mx.array(True) if mask.dtype == mx.bool_ else mx.array(0, mask.dtype)
            seen = mx.broadcast_to(fill, (*mask.shape[:-1], self.rows))
            mask = mx.concatenate([seen, mask], axis=-1)
        return both[0], both[1], mask

    def beside(self, own: mx.array, first: float) -> mx.array:
        """What goes with own rows [B, H, N], and ``first`` in the place of these."""
        return _behind(mx.full((1, 1, self.rows), first, own.dtype), own)

    def positions(self, own: mx.array) -> mx.array:
        """Those of own rows, int32 [B, H, N], and before them those of these."""
        return _behind(mx.arange(self.rows, dtype=mx.int32)[None, None], own)

    # Sequences that share no longer

    def whole(self, table: Table, offsets: list[int]) -> Table:
        """A table that holds these rows once for each sequence, and its own behind them.

        Args:
            table: the own rows of each sequence.
            offsets: tokens that each sequence has seen.
        """
        tail, width, columns = table.tail, table.width, []
        for column, first, own in zip(
            self._columns, self._parts, (tail.keys, tail.values), strict=True
        ):
            pairs = zip(first, own.view(width), strict=True)
            columns.append(column.like(tuple(_behind(*pair) for pair in pairs)))
        frame = self._frame and self._frame.of_lines(table.lines)
        found = Table([Segment(columns[0], columns[1], [self.rows + n for n in tail.rows])], frame)
        found.place(self.positions(table.positions(offsets)))
        for name, array in table.beside.items():
            fill = table.fills[name]
            found.attach(name, self.beside(array[:, :, :width], fill), fill)
        return found


def unshareable(config: H2OConfig) -> str:
    """What of these settings forbids that rows are shared; empty where nothing does."""
    if config.mixed:
        return "mixed precision, whose rows change"
    if config.speculative:
        return "speculation"
    if config.kv_handed == "latents":
        return "the latent rows of MLA"
    return ""


def _behind(first: mx.array, own: mx.array) -> mx.array:
    """``own`` [B, H, N, ...] behind the ``first`` ones, which are the same in every sequence."""
    first = mx.broadcast_to(first, (*own.shape[:2], *first.shape[2:]))
    return mx.concatenate([first, own], axis=2)
