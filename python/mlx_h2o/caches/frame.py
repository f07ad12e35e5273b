"""The frame of a head: packed rows are kept rotated, its keys relative to the mean of the first.

Codes of a few bits serve best where all elements have one range. The centre takes away a constant
that all keys of a head share, as biases of its projection make one; a rotation spreads a few large
elements over all (Ashkboos et al. 2024, QuaRot, https://arxiv.org/abs/2404.00456). Attention is the
same in any frame: the query is rotated as the keys are, a centre shifts all logits of a query
alike, which no softmax sees, and the output is rotated back once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

FIRST_ROWS = 64
"""Rows that a centre is the mean of, at most."""

Spans = Sequence[tuple[int, int]]
"""Of each sequence, which rows are its own: from, and up to. None: all."""

_GROUP = 32
"""Rows are kept in whole groups of so many elements."""


class Frame:
    """The centre of keys, and the sizes of rows: keys are kept as ``R (key - centre)``, values as
    ``R value``.

    R is the orthonormal Hadamard matrix, over blocks of the largest power of two that divides the
    size of a kept row: its own inverse. A row that 32 does not divide is kept with zeros behind it.
    A frame never changes, and is the same for all rows of a sequence. Values have no centre: those
    of the first rows, which take the attention that nothing else gets, are near zero.

    Args:
        centre: [B, H, 1, D], in the dtype of the rows.
        value_size: elements of a value.
    """

    def __init__(self, centre: mx.array, value_size: int) -> None:
        self.centre = centre
        self.sizes = centre.shape[3], value_size
        self._whole = all(size % _GROUP == 0 == size & (size - 1) for size in self.sizes)

    @classmethod
    def of(cls, keys: mx.array, values: mx.array, spans: Spans = ()) -> Frame:
        """That of rows [B, H, L, ...] and of those to come: the centre is the mean of the first."""
        return cls(_centre(keys, spans), values.shape[3])

    def starting(self, keys: mx.array, spans: Spans, held: Sequence[int]) -> Frame:
        """The frame in which new rows are kept: of sequences that ``held`` none, that of their
        first."""
        starts = [
            rows == 0 and (not spans or spans[n][1] > spans[n][0]) for n, rows in enumerate(held)
        ]
        if not any(starts):
            return self
        centre = _centre(keys, spans)
        if not all(starts):
            centre = mx.where(mx.array(starts)[:, None, None, None], centre, self.centre)
        return Frame(centre, self.sizes[1])

    # Rows

    def into(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values as they are kept."""
        if self._whole:
            return mx.hadamard_transform(keys - self.centre), mx.hadamard_transform(values)
        return _rotated(_in_groups(keys - self.centre)), _rotated(_in_groups(values))

    def back(self, rows: mx.array, side: int) -> mx.array:
        """Kept keys, or with ``side`` 1 values, as they came."""
        rows = _rotated(rows)
        if rows.shape[-1] != self.sizes[side]:
            rows = rows[..., : self.sizes[side]]
        return rows if side else rows + self.centre

    # Attention

    def query(self, queries: mx.array) -> mx.array:
        """Queries [B, Hq, L, D] as kept keys are multiplied by them."""
        return mx.hadamard_transform(queries) if self._whole else _rotated(_in_groups(queries))

    def shift(self, queries: mx.array, scale: float) -> mx.array:
        """float32 [B, Hq, L, 1]: what the logits of kept keys lack of those of the true keys."""
        batch, heads, length, size = queries.shape
        of_head = queries.astype(mx.float32).reshape(batch, self.centre.shape[1], -1, size)
        products = of_head @ (self.centre.astype(mx.float32) * scale).swapaxes(2, 3)
        return products.reshape(batch, heads, length, 1)

    def output(self, out: mx.array) -> mx.array:
        """What attention makes of kept values [B, Hq, L, ...], as it would of those that came."""
        return mx.hadamard_transform(out) if self._whole else _rotated(out)[..., : self.sizes[1]]

    # Sequences

    def each(self, change: Callable[[mx.array], mx.array]) -> Frame:
        """The frame of other sequences, whose centre is ``change`` of this."""
        return Frame(change(self.centre), self.sizes[1])


def as_they_came(frame: Frame | None, rows: mx.array, side: str) -> mx.array:
    """Kept "keys", or "values", outside of their frame."""
    return rows if frame is None else frame.back(rows, int(side == "values"))


def share_of_rows(out: mx.array, lse: mx.array, sinks: mx.array) -> mx.array:
    """An output [B, Hq, L, D] of attention without ``sinks`` [Hq], as it is with them; ``lse`` is
    float32 [B, Hq, L], of the rows alone."""
    share = mx.sigmoid(mx.expand_dims(lse - sinks.astype(mx.float32)[:, None], -1))
    return (out * share).astype(out.dtype)


def kept_size(size: int) -> int:
    """Elements of a kept row, of those that have so many."""
    return -(-size // _GROUP) * _GROUP


def _centre(rows: mx.array, spans: Spans) -> mx.array:
    """[B, H, 1, D], the mean of the first keys of each sequence's span, 0 where it is empty.

    Rounded to 8 bits, so that it does not depend on the order of a sum; any centre near the mean
    serves as well.
    """
    if spans:
        own = enumerate(spans)
        given = [rows[n : n + 1, :, start : max(stop, start)] for n, (start, stop) in own]
        return mx.concatenate([_centre(one, ()) for one in given])
    if rows.shape[2] == 0:
        return mx.zeros((*rows.shape[:2], 1, rows.shape[3]), rows.dtype)
    first = rows[:, :, :FIRST_ROWS].astype(mx.float32)
    return mx.mean(first, axis=2, keepdims=True).astype(mx.bfloat16).astype(rows.dtype)


def _in_groups(rows: mx.array) -> mx.array:
    missing = kept_size(rows.shape[-1]) - rows.shape[-1]
    return mx.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)]) if missing else rows


def _rotated(rows: mx.array) -> mx.array:
    """R times rows of whole groups."""
    size = rows.shape[-1]
    block = size & -size
    if rows.size == 0:  # MLX refuses none
        return rows
    if block == size:
        return mx.hadamard_transform(rows)
    blocks = rows.reshape(*rows.shape[:-1], size // block, block)
    return mx.hadamard_transform(blocks).reshape(rows.shape)
