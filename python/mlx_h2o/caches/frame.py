"""The frame of a head: packed rows are kept relative to the centre of its first rows, and rotated.

Codes of a few bits serve best where all elements have one range. A constant that all keys of a
head share, as biases of its projection make one, would take most of that range: the centre takes
it away. Few large elements would too: a rotation spreads them over all (Ashkboos et al. 2024,
QuaRot, https://arxiv.org/abs/2404.00456). Attention is the same in any frame: the query is rotated
like the keys, a centre shifts all logits of a query alike, which no softmax sees, and the output
is turned back once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

FIRST_ROWS = 64
"""Rows that a centre is the mean of, at most."""

Spans = Sequence[tuple[int, int]]
"""Of each line, which rows are its own: from, and up to. None: all."""

_GROUP = 32
"""Rows are kept in whole groups of so many elements."""


class Frame:
    """Centres of keys and of values; rows [B, H, N, D] are kept as ``R (row - centre)``.

    R is the orthonormal Hadamard matrix, over blocks of the largest power of two that divides the
    size of a kept row: its own inverse. A row that 32 does not divide is kept with zeros behind it.
    A frame never changes, and is the same for all rows of a line, however they are kept.

    Args:
        keys: [B, H, 1, D], or of batch 1 for all lines, in the dtype of the rows.
        values: [B, H, 1, Dv].
        shared: whether rows that others have too are in it, so that it stays though a line has no
            rows of its own.
    """

    def __init__(self, keys: mx.array, values: mx.array, shared: bool = False) -> None:
        self.centres = keys, values
        self.shared = shared
        self._whole = all(_is_whole(one.shape[3]) for one in self.centres)
        self._spread: dict[tuple[int, int, mx.Dtype], mx.array] = {}

    @classmethod
    def of(cls, keys: mx.array, values: mx.array, spans: Spans = ()) -> Frame:
        """That of rows [B, H, L, ...] and of those to come: the centres are means of the first."""
        return cls(_centre(keys, spans), _centre(values, spans))

    def starting(self, keys: mx.array, values: mx.array, spans: Spans, held: Sequence[int]) -> Frame:
        """The frame in which new rows are kept: of lines that hold no rows, that of their first.

        Args:
            keys: new keys, as of ``of``.
            values: new values.
            spans: as of ``of``.
            held: rows of each line before.
        """
        starts = [
            rows == 0 and (not spans or spans[line][1] > spans[line][0])
            for line, rows in enumerate(held)
        ]
        if self.shared or not any(starts):
            return self
        found = Frame.of(keys, values, spans)
        if all(starts):
            return found
        new = mx.array(starts)[:, None, None, None]
        pairs = zip(found.centres, self.centres, strict=True)
        return Frame(*(mx.where(new, one, other) for one, other in pairs))

    # Rows

    def into(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values as they are kept."""
        centre, other = self.centres
        if self._whole:
            return (
                mx.hadamard_transform(keys - centre),
                mx.hadamard_transform(values - other),
            )
        return _rotated(_in_groups(keys - centre)), _rotated(_in_groups(values - other))

    def back(self, rows: mx.array, side: int) -> mx.array:
        """Kept keys, or with ``side`` 1 values, as they came."""
        centre = self.centres[side]
        return _rotated(rows)[..., : centre.shape[3]] + centre

    # Attention

    def query(self, queries: mx.array) -> mx.array:
        """Queries [B, Hq, L, D] as kept keys are multiplied by them."""
        if self._whole:
            return mx.hadamard_transform(queries)
        return _rotated(_in_groups(queries))

    def shift(self, queries: mx.array, scale: float) -> mx.array:
        """float32 [B, Hq, L, 1]: what the logits of kept keys lack of those of the true keys."""
        centre = self._for_heads(0, queries.shape[1], mx.float32)
        return (queries.astype(mx.float32) * scale) @ centre.swapaxes(2, 3)

    def output(
        self, out: mx.array, lse: mx.array | None = None, sinks: mx.array | None = None
    ) -> mx.array:
        """What attention makes of kept values, as it would of those that came.

        Args:
            out: [B, Hq, L, ...], of attention without sinks.
            lse: float32 [B, Hq, L], of the logits of true keys; where there are sinks, and where a
                query may see nothing, for which it is -inf and the output 0.
            sinks: learned logits [Hq].
        """
        centre = self._for_heads(1, out.shape[1], out.dtype)
        if self._whole:
            out = mx.hadamard_transform(out) + centre
        else:
            out = _rotated(out)[..., : centre.shape[3]] + centre
        if lse is None:
            return out
        lse = mx.expand_dims(lse, -1)
        if sinks is None:
            return mx.where(lse == -mx.inf, mx.array(0, out.dtype), out)
        share = mx.sigmoid(lse - sinks.astype(mx.float32)[:, None, None])  # of the rows
        return (out * share).astype(out.dtype)

    def _for_heads(self, side: int, heads: int, dtype: mx.Dtype) -> mx.array:
        """The centre beside each of so many query heads."""
        known = side, heads, dtype
        if known not in self._spread:
            centre = self.centres[side]
            if (centre.shape[1], centre.dtype) != (heads, dtype):
                centre = mx.repeat(centre.astype(dtype), heads // centre.shape[1], axis=1)
            self._spread[known] = centre
        return self._spread[known]

    # Lines

    def each(self, change: Callable[[mx.array], mx.array]) -> Frame:
        """The frame of other lines, whose centres are ``change`` of these; a shared one stays."""
        return self if self.shared else Frame(*map(change, self.centres))

    def of_lines(self, count: int) -> Frame:
        """A shared frame as that of so many lines of their own."""
        shapes = ((count, *one.shape[1:]) for one in self.centres)
        return Frame(*(mx.broadcast_to(*pair) for pair in zip(self.centres, shapes, strict=True)))

    @property
    def nbytes(self) -> int:
        """Bytes of the centres, and of those that lie ready beside query heads."""
        held = {id(one): one.nbytes for one in (*self.centres, *self._spread.values())}
        return sum(held.values())


def joined(frames: Sequence[Frame | None]) -> Frame | None:
    """That of the lines of several tables, one behind the other."""
    given = [one for one in frames if one is not None]
    if not given or given[0].shared:
        return given[0] if given else None
    return Frame(*(mx.concatenate(sides) for sides in zip(*(one.centres for one in given))))


def kept_size(size: int) -> int:
    """Elements of a kept row, of those that have so many."""
    return -(-size // _GROUP) * _GROUP


def _centre(rows: mx.array, spans: Spans) -> mx.array:
    """[B, H, 1, D], the mean of the first rows of each line's span, 0 where it is empty.

    Rounded to 8 bits, so that it does not depend on the order of a sum; any centre near the mean
    serves as well.
    """
    if spans:
        lines = [
            rows[line : line + 1, :, start : max(stop, start)]
            for line, (start, stop) in enumerate(spans)
        ]
        return mx.concatenate([_centre(one, ()) for one in lines])
    if rows.shape[2] == 0:
        return mx.zeros((*rows.shape[:2], 1, rows.shape[3]), rows.dtype)
    first = rows[:, :, :FIRST_ROWS].astype(mx.float32)
    return mx.mean(first, axis=2, keepdims=True).astype(mx.bfloat16).astype(rows.dtype)


def _is_whole(size: int) -> bool:
    return size % _GROUP == 0 and size & (size - 1) == 0


def _in_groups(rows: mx.array) -> mx.array:
    missing = kept_size(rows.shape[-1]) - rows.shape[-1]
    return mx.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)]) if missing else rows


def _rotated(rows: mx.array) -> mx.array:
    """R times rows of whole groups."""
    size = rows.shape[-1]
    block = size & -size
    if block == size:
        return mx.hadamard_transform(rows)
    blocks = rows.reshape(*rows.shape[:-1], size // block, block)
    return mx.hadamard_transform(blocks).reshape(rows.shape)
