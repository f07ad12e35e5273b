"""Rows that sequences share: those of the first tokens, kept once and never changed.

A cache that stands on a prefix holds its own rows, the later ones, in its table. Attention reads
both, and merges the outputs by the shares that they have in the common softmax.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .. import policies
from ..config import H2OConfig
from ..operations.backends import resolve
from ..operations.requests import AttentionResult
from .attention import settings_of
from .column import Column, Layout, Parts
from .table import Segment, Table


class Prefix:
    """The first rows of one layer, of any number of sequences. Nothing is evaluated.

    Args:
        keys: a column of rows [1, H, rows, D], and none behind them.
        values: of rows [1, H, rows, Dv].
        sparse_v: as of ``H2OConfig``.

    Attributes:
        rows: how many.
    """

    def __init__(self, keys: Column, values: Column, sparse_v: float) -> None:
        self._columns = keys, values
        self.rows: int = keys.parts[0].shape[2]
        self._settings = settings_of(keys, values, sparse_v)
        # What attention reads: other array objects than the columns', made once.
        self._parts = keys.view(self.rows), values.view(self.rows)

    @classmethod
    def taken_from(
        cls, table: Table, offset: int, rows: int, sparse_v: float
    ) -> tuple[Prefix, Table | None]:
        """The first ``rows``, in order, of a table of one line that has seen ``offset`` tokens, and
        a table of the others; None: there are none."""
        tail, width = table.tail, table.width
        keys, values = (
            column.each(lambda part: mx.contiguous(part[:, :, :rows]))
            for column in (tail.keys, tail.values)
        )
        own = None
        if width > rows:
            own = table.each(lambda array: mx.contiguous(array[:, :, rows:width]), [width - rows])
            own.place(table.positions([offset])[:, :, rows:])
        return cls(keys, values, sparse_v), own

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns)

    @property
    def state(self) -> tuple[Parts, Parts]:
        """Keys and values as they are kept."""
        return self._parts

    def layouts(self, lines: int) -> list[Layout]:
        """Of the rows of so many sequences that fit these."""
        return [(lines, *column.layout[1:]) for column in self._columns]

    # Attention

    def joined(self, own: AttentionResult, queries: mx.array, scale: float) -> AttentionResult:
        """Attention over own rows, with its lse, and these rows: as over both in one array.

        Args:
            own: of the own rows; its scores stay what they are.
            queries: [B, Hq, L, D], all of which see all rows.
            scale: factor of the products.
        """
        found = self._attention(queries, scale)
        assert own.lse is not None and found.lse is not None
        out, lse = resolve().merge_segments([found.out, own.out], [found.lse, own.lse])
        return own._replace(out=out, lse=lse)

    def _attention(self, queries: mx.array, scale: float) -> AttentionResult:
        """The sequences are further query heads of each KV head, so that rows are read once."""
        batch, length = queries.shape[0], queries.shape[2]
        of = self._columns[0].layout[1]
        if batch > 1:
            queries = _turned(queries.reshape(batch, of, -1, *queries.shape[2:]), 1)
        keys, values = (
            column.given(parts, as_array=False)
            for column, parts in zip(self._columns, self._parts, strict=True)
        )
        if not self._settings and keys.dtype != queries.dtype:
            keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
        found = resolve().attention(
            queries, keys, values, scale=scale, return_lse=True, **self._settings
        )
        if batch == 1:
            return found
        assert found.lse is not None
        out = _turned(found.out.reshape(of, batch, -1, length, found.out.shape[3]), batch)
        lse = _turned(found.lse.reshape(of, batch, -1, length), batch)
        return AttentionResult(out, lse=lse)

    def before(
        self, keys: mx.array, values: mx.array, mask: mx.array | str | None
    ) -> tuple[mx.array, mx.array, mx.array | str | None]:
        """These rows and then own ones as arrays [B, H, rows + N, ...], which live no longer than
        the attention of a chunk needs them, and the mask of the own ones for all."""
        lines, width = keys.shape[0], keys.shape[2]
        both = []
        for column, parts, own in zip(self._columns, self._parts, (keys, values), strict=True):
            first = column.given(parts, as_array=True).astype(own.dtype)
            first = mx.broadcast_to(first, (lines, *first.shape[1:]))
            both.append(mx.concatenate([first, own], axis=2))
        if isinstance(mask, mx.array):
            mask = mx.broadcast_to(mask, (*mask.shape[:-1], width))
            fill = mx.array(True) if mask.dtype == mx.bool_ else mx.array(0, mask.dtype)
            seen = mx.broadcast_to(fill, (*mask.shape[:-1], self.rows))
            mask = mx.concatenate([seen, mask], axis=-1)
        return both[0], both[1], mask

    def beside(self, own: mx.array, first: float) -> mx.array:
        """What goes with own rows [B, H, N], and ``first`` in the place of these."""
        return mx.concatenate([mx.full((*own.shape[:2], self.rows), first, own.dtype), own], axis=2)

    def positions(self, own: mx.array) -> mx.array:
        """Those of own rows, int32 [B, H, N], and before them those of these."""
        first = mx.broadcast_to(mx.arange(self.rows, dtype=mx.int32), (*own.shape[:2], self.rows))
        return mx.concatenate([first, own], axis=2)

    # Sequences that share no longer

    def whole(self, table: Table | None, offsets: list[int], unseen: float) -> Table:
        """A table that holds these rows once for each sequence, and its own behind them.

        Args:
            table: the own rows of each sequence; None: there are none.
            offsets: tokens that each sequence has seen.
            unseen: what stands for the scores of these rows.
        """
        lines, width = len(offsets), 0 if table is None else table.width
        columns = []
        for place, column in enumerate(self._columns):
            parts: list[Any] = [
                mx.broadcast_to(part, (lines, *part.shape[1:])) for part in self._parts[place]
            ]
            if table is not None:
                own = (table.tail.keys, table.tail.values)[place].view(width)
                pairs = zip(parts, own, strict=True)
                parts = [mx.concatenate([first, rows], axis=2) for first, rows in pairs]
            columns.append(column.like(tuple(mx.contiguous(part) for part in parts)))
        rows = [0] * lines if table is None else table.tail.rows
        found = Table([Segment(columns[0], columns[1], [self.rows + count for count in rows])])
        if table is None:
            found.place(self.positions(mx.zeros((*found.shape, 0), mx.int32)))
            return found
        found.place(self.positions(table.positions(offsets)))
        for name, array in table.beside.items():
            found.attach(name, self.beside(array[:, :, :width], unseen), table.fills[name])
        return found


def unshareable(config: H2OConfig) -> str:
    """What of these settings forbids that rows are shared; empty where nothing does."""
    if config.mixed:
        return "mixed precision, whose rows change"
    if policies.known(config.policy).merges:
        return f"the policy {config.policy!r}, whose rows change"
    if config.speculative:
        return "speculation"
    if config.kv_handed == "latents":
        return "the latent rows of MLA"
    return ""


def _turned(array: mx.array, batch: int) -> mx.array:
    """The first two axes exchanged: [B, H, G, ...] as [1, H * B * G, ...], for a batch of 1; and
    [H, B, G, ...] as [B, H * G, ...]."""
    array = array.swapaxes(0, 1)
    return array.reshape(batch, -1, *array.shape[3:])
