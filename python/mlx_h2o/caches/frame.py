"""The frame of a head: packed rows are stored rotated, and relative to a centre.

Codes of few bits work best if all elements have the same range. Subtracting their centre removes a
constant that all keys of a head share, such as a bias of the projection; the rotation spreads a few
large elements over all (Ashkboos et al. 2024, QuaRot, https://arxiv.org/abs/2404.00456). Attention
is the same in any frame: queries are rotated like the keys, the keys' centre shifts all logits of a
query equally, which the softmax ignores, and the output is rotated back once and gets the values'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import mlx.core as mx

from .step import Step

FIRST_ROWS = 64
"""Centres are chosen by at most this many rows."""

_GROUP = 32
"""Stored rows are padded to a multiple of this many elements."""


class Frame:
    """The centres, and the row sizes: keys and values are stored as ``R (row - centre)``.

    R, its own inverse, is the orthonormal Hadamard matrix over blocks of the largest power of two
    that divides the size of a stored row. Rows are padded with zeros to a multiple of 32. A frame
    never changes, and is the same for all rows of a sequence.

    Args:
        centres: of keys [B, H, 1, D] and of values [B, H, 1, Dv], in the dtype of the rows.
    """

    def __init__(self, centres: Sequence[mx.array]) -> None:
        self.centres = keys, values = (*centres,)
        self.sizes = keys.shape[3], values.shape[3]
        whole = all(size % _GROUP == 0 == size & (size - 1) for size in self.sizes)
        self.rotate = mx.hadamard_transform if whole else _rotated
        """R times rows: a query [B, Hq, L, D] has to be rotated to match stored keys."""

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> Frame:
        """The frame of these rows [B, H, L, ...] and of later ones: keys have their mean as centre,
        values the first one, if it is shorter than half of the mean, else 0.

        A text's first token often gets half of the attention, so that the error of its value is in
        every output: at the centre it has none. The mean of the values says nothing about it.
        """
        first, seen = (rows[:, :, :FIRST_ROWS].astype(mx.float32) for rows in (keys, values))
        norms = mx.linalg.norm(seen, axis=3, keepdims=True)
        small = 2 * norms[:, :, :1] < mx.mean(norms, axis=2, keepdims=True)
        found = mx.mean(first, axis=2, keepdims=True), mx.where(small, seen[:, :, :1], 0)
        # To 8 bits, so that no order of a sum matters; centres near these serve as well.
        return cls([one.astype(mx.bfloat16).astype(keys.dtype) for one in found])

    def starting(self, keys: mx.array, values: mx.array, step: Step, held: Sequence[int]) -> Frame:
        """The frame for a step's rows: this one, but sequences that ``held`` no rows get centres
        from their first rows."""
        starts = [rows == 0 < new for rows, new in zip(held, step.counts, strict=True)]
        if not any(starts):
            return self
        if all(starts) and not step.spans:
            return Frame.of(keys, values)
        frames, spans = [], step.spans or [(0, step.length)] * step.sequences
        for n, (new, (start, stop)) in enumerate(zip(starts, spans, strict=True)):
            one = slice(n, n + 1)
            rows = keys[one, :, start:stop], values[one, :, start:stop]
            frames.append(Frame.of(*rows) if new else self.each(itemgetter(one)))
        return Frame.joined(frames)

    # Rows

    def into(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values in stored form."""
        return self.rotate(keys - self.centres[0]), self.rotate(values - self.centres[1])

    def back(self, rows: mx.array, side: int) -> mx.array:
        """Stored keys, or with ``side`` 1 values, as they arrived; also the output of attention
        over stored values, [B, Hq, L, ...], as of the true ones."""
        (batch, heads, length, _), size, centre = rows.shape, self.sizes[side], self.centres[side]
        kv = centre.shape[1]
        rows = self.rotate(rows) if rows.size else _rotated(rows)  # MLX refuses empty arrays
        rows = rows if rows.shape[3] == size else rows[..., :size]
        rows = rows.reshape(batch, kv, heads // kv * length, size) + centre.astype(rows.dtype)
        return rows.reshape(batch, heads, length, size)

    # Attention

    def shift(self, queries: mx.array, scale: float) -> mx.array:
        """float32 [B, Hq, L, 1]: what to add to logits of stored keys to get the true ones."""
        batch, heads, length, size = queries.shape
        of_head = queries.astype(mx.float32).reshape(batch, self.centres[0].shape[1], -1, size)
        products = of_head @ (self.centres[0].astype(mx.float32) * scale).swapaxes(2, 3)
        return products.reshape(batch, heads, length, 1)

    # Sequences

    @classmethod
    def joined(cls, frames: Sequence[Frame]) -> Frame:
        """One frame for the sequences of all, in order."""
        centres = zip(*(one.centres for one in frames), strict=True)
        return cls([mx.concatenate([*one]) for one in centres])

    def each(self, change: Callable[[mx.array], mx.array]) -> Frame:
        """A frame for other sequences, whose centres are ``change`` of these."""
        return Frame([*map(change, self.centres)])


def _rotated(rows: mx.array) -> mx.array:
    """R times rows, padded to a stored row's size."""
    size = -(-rows.shape[-1] // _GROUP) * _GROUP
    if missing := size - rows.shape[-1]:
        rows = mx.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])
    block = size & -size
    if rows.size == 0:  # MLX refuses empty arrays
        return rows
    blocks = rows.reshape(*rows.shape[:-1], size // block, block)
    return mx.hadamard_transform(blocks).reshape(rows.shape)
