"""The frame of a head: packed rows are stored rotated, and keys relative to the mean of the first.

Codes of few bits work best if all elements have the same range. Subtracting the centre removes a
constant that all keys of a head share, such as a bias of the projection; the rotation spreads a few
large elements over all (Ashkboos et al. 2024, QuaRot, https://arxiv.org/abs/2404.00456). Attention
is the same in any frame: queries are rotated like the keys, the centre shifts all logits of a query
equally, which the softmax ignores, and the output is rotated back once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from .step import Step

FIRST_ROWS = 64
"""A centre is the mean of at most this many keys."""

_GROUP = 32
"""Stored rows are padded to a multiple of this many elements."""


class Frame:
    """The centre of the keys, and the row sizes: keys are stored as ``R (key - centre)``, values as
    ``R value``.

    R, its own inverse, is the orthonormal Hadamard matrix over blocks of the largest power of two
    that divides the size of a stored row. Rows are padded with zeros to a multiple of 32. A frame
    never changes, and is the same for all rows of a sequence. Values have no centre: the first
    ones, those of attention sinks, are near zero, so their mean says nothing about the others.

    Args:
        centre: [B, H, 1, D], in the dtype of the rows.
        value_size: elements of a value.
    """

    def __init__(self, centre: mx.array, value_size: int) -> None:
        self.centre = centre
        self.sizes = centre.shape[3], value_size
        whole = all(size % _GROUP == 0 == size & (size - 1) for size in self.sizes)
        self._rotate = mx.hadamard_transform if whole else _rotated

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> Frame:
        """The frame of these rows [B, H, L, ...] and of later ones, centred on the first keys."""
        return cls(_centre(keys), values.shape[3])

    def starting(self, keys: mx.array, step: Step, held: Sequence[int]) -> Frame:
        """The frame for a step's rows: this one, but sequences that ``held`` no rows get a centre
        from their first keys."""
        starts = [rows == 0 < new for rows, new in zip(held, step.counts, strict=True)]
        if not any(starts):
            return self
        own = enumerate(step.spans)
        parts = [keys[n : n + 1, :, start:stop] for n, (start, stop) in own] or [keys]
        centre = mx.concatenate([_centre(part) for part in parts])
        if not all(starts):
            centre = mx.where(mx.array(starts)[:, None, None, None], centre, self.centre)
        return self.each(lambda _: centre)

    # Rows

    def into(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values in stored form."""
        return self._rotate(keys - self.centre), self._rotate(values)

    def back(self, rows: mx.array, side: int) -> mx.array:
        """Stored keys, or with ``side`` 1 values, as they arrived."""
        rows = _rotated(rows)
        if rows.shape[-1] != self.sizes[side]:
            rows = rows[..., : self.sizes[side]]
        return rows if side else rows + self.centre

    # Attention

    def query(self, queries: mx.array) -> mx.array:
        """Queries [B, Hq, L, D], rotated to match stored keys."""
        return self._rotate(queries)

    def shift(self, queries: mx.array, scale: float) -> mx.array:
        """float32 [B, Hq, L, 1]: what to add to logits of stored keys to get the true ones."""
        batch, heads, length, size = queries.shape
        of_head = queries.astype(mx.float32).reshape(batch, self.centre.shape[1], -1, size)
        products = of_head @ (self.centre.astype(mx.float32) * scale).swapaxes(2, 3)
        return products.reshape(batch, heads, length, 1)

    def output(self, out: mx.array) -> mx.array:
        """The output of attention over stored values, [B, Hq, L, ...], rotated back."""
        out, size = self._rotate(out), self.sizes[1]
        return out if out.shape[3] == size else out[..., :size]

    # Sequences

    def each(self, change: Callable[[mx.array], mx.array]) -> Frame:
        """A frame for other sequences, whose centre is ``change`` of this one."""
        return Frame(change(self.centre), self.sizes[1])


def kept_size(size: int) -> int:
    """Elements of a stored row, for rows of ``size`` elements."""
    return -(-size // _GROUP) * _GROUP


def _centre(rows: mx.array) -> mx.array:
    """[B, H, 1, D], the mean of the first of these keys, 0 if there are none.

    Rounded to 8 bits, so that it does not depend on the order of a sum; any centre near the mean
    serves as well.
    """
    if rows.shape[2] == 0:
        return mx.zeros((*rows.shape[:2], 1, rows.shape[3]), rows.dtype)
    first = rows[:, :, :FIRST_ROWS].astype(mx.float32)
    return mx.mean(first, axis=2, keepdims=True).astype(mx.bfloat16).astype(rows.dtype)


def _rotated(rows: mx.array) -> mx.array:
    """R times rows, padded to a stored row's size."""
    size = kept_size(rows.shape[-1])
    if missing := size - rows.shape[-1]:
        rows = mx.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])
    block = size & -size
    if rows.size == 0:  # MLX refuses empty arrays
        return rows
    if block == size:
        return mx.hadamard_transform(rows)
    blocks = rows.reshape(*rows.shape[:-1], size // block, block)
    return mx.hadamard_transform(blocks).reshape(rows.shape)
