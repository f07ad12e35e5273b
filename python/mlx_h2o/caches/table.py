"""Rows of one layer as a table: columns of keys and values, and what else goes with a row.

A table holds one line, or one for each sequence of a batch. The rows of a line fill the first slots
of each segment; slots behind them are unused. Every event, be it an eviction, a trim or a sequence
that leaves, says which rows go to which slots, and the columns take and put them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.composed.buffers import padded
from .column import Column, Layout, Parts
from .frame import Frame

NONE = -1
"""The position of an unused slot."""


@dataclass
class Segment:
    """Rows that are kept in one way; ``rows`` of each line are in use."""

    keys: Column
    values: Column
    rows: list[int]

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        return self.keys.layout, self.values.layout

    @property
    def width(self) -> int:
        return max(self.rows)

    @property
    def capacity(self) -> int:
        return min(self.keys.capacity, self.values.capacity)  # set from outside, one may lack room

    def each(self, change: Callable[[Column], Column]) -> Segment:
        return Segment(change(self.keys), change(self.values), list(self.rows))


class Table:
    """Segments of rows, of which the last one takes the new rows.

    Attributes:
        segments: all but the last hold packed rows of mixed precision and change as a whole.
        packed_width: slots before the tail.
        frame: what all rows are kept relative to; None: nothing, they are kept as they come.
        shown: slots that attention is given: those in use, and since the last append, where lines
            had padding, as many as if none had.
        beside: arrays [B, H, slots, ...] of what else goes with a row, and in ``fills`` what unused
            slots hold. They have as many slots as the segments have room for.
    """

    def __init__(self, segments: list[Segment], frame: Frame | None = None) -> None:
        self.segments = segments
        self.frame = frame
        self.packed_width = sum(segment.width for segment in segments[:-1])
        self.shown = self.width
        self.beside: dict[str, mx.array] = {}
        self.fills: dict[str, float] = {}
        self.packed: list[Any] | None = None  # the packed segments, as attention has read them
        self.changed = False  # beside attention, which reads what it changes
        # The rows of the tail beyond ``known`` have come one after the other.
        self._placed: mx.array | None = None
        self._known = [0] * len(segments[-1].rows)
        self._most = 0  # rows that the tail has had since ``give_back``

    @property
    def tail(self) -> Segment:
        return self.segments[-1]

    @property
    def lines(self) -> int:
        return len(self.segments[-1].rows)

    @property
    def width(self) -> int:
        return self.packed_width + self.tail.width

    @property
    def lengths(self) -> list[int]:
        """Rows of each line."""
        if len(self.segments) == 1:
            return self.segments[0].rows
        return [sum(rows) for rows in zip(*(one.rows for one in self.segments), strict=True)]

    @property
    def shape(self) -> tuple[int, int]:
        """B and H."""
        batch, heads = self.segments[-1].keys.parts[0].shape[:2]
        return batch, heads

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of keys and values as they come."""
        found = self.tail.layouts
        if self.frame is None:
            return found
        pairs = zip(found, self.frame.sizes, strict=True)
        return tuple((*one[:2], size, one[3]) for one, size in pairs)

    def loose(self, scored: bool) -> list[mx.array]:
        """What attention does not read: whoever evaluates a step must evaluate it too.

        Rows that are ``scored`` take in what attention says, and it is tied to its output.
        """
        placed = [] if self._placed is None else [self._placed]
        return placed if scored else [*self.beside.values(), *placed]

    # Positions

    def positions(self, offsets: Sequence[int]) -> mx.array:
        """int32 [B, H, width]: the place of each row in its sequence of ``offsets`` tokens."""
        before, tail = self.packed_width, self.tail
        rows, known = tail.rows, self._known
        if len(rows) == 1 or len(set(offsets)) == len(set(rows)) == len(set(known)) == 1:
            if self._placed is not None and known == rows:
                return self._placed
            count, end = rows[0] - known[0], offsets[0]
            new = mx.arange(end - count, end, dtype=mx.int32)
            new = mx.broadcast_to(new, (*self.shape, count))
            return new if self._placed is None else mx.concatenate([self._placed, new], axis=2)
        width = tail.width
        slots, shape = mx.arange(width, dtype=mx.int32), (*self.shape, width)
        first = _column([offset - count for offset, count in zip(offsets, rows, strict=True)])
        found = mx.broadcast_to(slots + first, shape)
        if self._placed is not None:
            packed = self._placed[:, :, :before]
            placed = padded(self._placed[:, :, before:], width, NONE)[:, :, :width]
            found = mx.where(slots < _column(known), placed, found)
        found = mx.where(slots < _column(rows), found, NONE)
        return mx.concatenate([packed, found], axis=2) if before else found

    def place(self, positions: mx.array | None) -> None:
        """Remember the positions of all rows; None: they follow each other from 0."""
        self.changed = True
        self._placed = positions
        self._known = [0] * self.lines if positions is None else list(self.tail.rows)

    def slots_of(self, line: int) -> mx.array:
        """uint32 [n]: the slots of a line's rows."""
        parts, start = [], 0
        for one in self.segments:
            parts.append(mx.arange(start, start + one.rows[line], dtype=mx.uint32))
            start += one.width
        return mx.concatenate(parts)

    # Rows that come

    def append(
        self, keys: mx.array, values: mx.array, limit: int, spans: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Add rows [B, H, L, D] behind those of each line.

        Args:
            keys: new keys.
            values: new values.
            limit: rows beyond which no room is made in advance.
            spans: which of the rows are a line's own, from and up to; the others, padding, lie
                behind them, in slots that stay unused. None given: all.
        """
        if self.frame is not None:
            self.frame = self.frame.starting(keys, spans, self.lengths)
            keys, values = self.frame.into(keys, values)
        tail, added = self.tail, keys.shape[2]
        slots, width = None, tail.width + added
        if not (spans or self.ragged):
            start = tail.rows[0]
            tail.keys.append(start, keys, limit)
            tail.values.append(start, values, limit)
        else:
            slots = mx.broadcast_to(self._slots(added, spans), keys.shape[:3])
            for column, rows in ((tail.keys, keys), (tail.values, values)):
                new = column.encode(rows)
                column.reserve(width, limit, new)
                column.put(slots, new)
        counts = [stop - start for start, stop in spans] if spans else [added] * len(tail.rows)
        tail.rows = [rows + count for rows, count in zip(tail.rows, counts, strict=True)]
        self.shown = self.packed_width + width
        for name, array in self.beside.items():
            if array.shape[2] < self.packed_width + tail.keys.capacity:
                self.changed = True
                self.attach(name, array, self.fills[name])
        if slots is not None:
            self._renew(slots + mx.array(self.packed_width, mx.uint32))

    @property
    def ragged(self) -> bool:
        """Whether lines have unlike numbers of rows in the tail."""
        rows = self.segments[-1].rows
        return len(rows) > 1 and min(rows) != max(rows)

    def mask_of_one(self, ahead: int) -> mx.array | None:
        """bool [B, 1, 1, slots], of the rows up to each line's last, or with ``ahead`` 1 up to the
        one that comes next; None: all. Only of a table of one segment."""
        rows = self.segments[-1].rows
        if max(rows) == min(rows):
            return None
        own = (mx.array(rows) + ahead)[:, None, None, None]
        return mx.arange(max(rows) + ahead) < own

    def append_one(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """The same of one row where there is room, and where all lines have some.

        Returns the tail's slots in use, as ``Column.view`` gives them.
        """
        tail = self.segments[-1]
        if self.frame is not None:
            keys, values = self.frame.into(keys, values)
        kept, others = tail.keys, tail.values
        if self.ragged:
            return self._put_one(keys, values)
        start, count = tail.rows[0], len(kept.parts)
        found = kept.append_both(others, keys, values, start)
        middle = len(found) // 2
        kept.parts, others.parts = tuple(found[:count]), tuple(found[count:middle])
        tail.rows = [start + 1] * len(tail.rows)
        self.shown = self.packed_width + start + 1
        return tuple(found[middle : middle + count]), tuple(found[middle + count :])

    def _put_one(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """The same where lines have unlike numbers of rows, and the table one segment."""
        tail, slots = self.segments[-1], mx.array(self.segments[-1].rows, mx.uint32)[:, None, None]
        slots = mx.broadcast_to(slots, (*keys.shape[:2], 1))
        tail.keys.put(slots, tail.keys.encode(keys))
        tail.values.put(slots, tail.values.encode(values))
        tail.rows = [rows + 1 for rows in tail.rows]
        self.shown = width = max(tail.rows)
        self._renew(slots)
        return tail.keys.view(width), tail.values.view(width)

    def _renew(self, slots: mx.array) -> None:
        """Have beside rows at ``slots`` [B, H, n] what unused ones have: queries may have changed
        it."""
        for name, array in self.beside.items():
            fresh = mx.full((*slots.shape, *array.shape[3:]), self.fills[name], array.dtype)
            self.beside[name] = resolve().put_rows(array, slots, fresh)

    def _slots(self, added: int, spans: Sequence[tuple[int, int]]) -> mx.array:
        """[lines, 1, L]: where new rows go in the tail."""
        token = mx.arange(added, dtype=mx.int32)
        if spans:
            token = (token - _column([start for start, _ in spans])) % added
        return (token + _column(self.tail.rows)).astype(mx.uint32)

    def attach(self, name: str, array: mx.array, fill: float) -> None:
        """Keep ``array`` [B, H, n, ...] beside the first n rows, and ``fill`` beside the others."""
        self.fills[name] = fill
        self.beside[name] = padded(array, self.packed_width + self.tail.keys.capacity, fill)

    # Rows that go, and rows that move

    def close_gaps(
        self,
        kept: mx.array,
        lines: Sequence[int],
        rows: Sequence[int],
        positions: mx.array,
        start: int,
        tail: int,
    ) -> None:
        """Keep the rows at ``kept`` [b, H, K] of the sequences in ``lines``, in the first slots,
        and behind them ``tail`` rows from slot ``start`` on; ``rows`` of each line remain.

        ``positions`` are those before. Only of a table of one segment.
        """
        columns = (self.tail.keys, self.tail.values)
        buffers = [*(part for one in columns for part in one.parts), *self.beside.values()]
        found = resolve().compact_rows([*buffers, positions], kept, lines, start, tail)
        for column in columns:
            count = len(column.parts)
            column.parts, found = tuple(found[:count]), found[count:]
        self.beside = dict(zip(self.beside, found[:-1], strict=True))
        self._cut(list(rows))
        self.place(found[-1][:, :, : self.width])

    def truncate(self, rows: Sequence[int]) -> None:
        """Keep the first ``rows`` of each line's tail."""
        self._cut(list(rows))
        self._known = [min(known, count) for known, count in zip(self._known, rows, strict=True)]
        if self._placed is not None:
            self._placed = self._placed[:, :, : self.packed_width + max(self._known)]

    def _cut(self, rows: list[int]) -> None:
        """``rows`` of the tail stay in use; the others are forgotten."""
        self.changed = True
        self._most = max(self._most, self.tail.width)
        self.tail.rows = rows
        self.shown, before = self.width, self.packed_width
        for name, array in self.beside.items():
            if len(set(rows)) == 1:
                if before + rows[0] < array.shape[2]:
                    array[:, :, before + rows[0] :] = self.fills[name]
                continue
            slots = mx.arange(array.shape[2]) - before
            used = mx.expand_dims(slots < _column(rows), list(range(3, array.ndim)))
            self.beside[name] = mx.where(used, array, self.fills[name])

    def make_ahead(self, rows: int) -> None:
        """Have room for so many rows of the tail at once, from the next append on."""
        self.tail.keys.ahead = self.tail.values.ahead = rows

    def give_back(self) -> None:
        """Let go of the memory behind the rows, of room that was made at once."""
        width = self.tail.width
        keys, values = self.tail.keys, self.tail.values
        if self._most > width and keys.give_back(width) + values.give_back(width):
            self._most = width

    def fit(self, limit: int) -> None:
        """Give up room for more than ``limit`` rows in the tail."""
        tail = self.tail
        capacity = max(limit, *tail.rows)
        if tail.keys.capacity > capacity or tail.values.capacity > capacity:
            self.segments[-1] = tail.each(lambda column: column.resized(capacity))
            end = self.packed_width + capacity
            self.beside = {name: mx.contiguous(a[:, :, :end]) for name, a in self.beside.items()}

    def each(
        self, change: Callable[[mx.array], mx.array], rows: Sequence[int] | None = None
    ) -> Table:
        """The table whose arrays are ``change`` of these, with so many ``rows`` of each line in
        each segment; None: as they are. Positions are to be placed."""
        segments = [
            Segment(one.keys.each(change), one.values.each(change), list(rows or one.rows))
            for one in self.segments
        ]
        found = Table(segments, self.frame)
        found.fills = dict(self.fills)
        found.beside = {name: change(array) for name, array in self.beside.items()}
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored, and of room for more where memory is taken for it."""
        columns = [column for one in self.segments for column in (one.keys, one.values)]
        beside = self.loose(scored=False)
        frame = 0 if self.frame is None else self.frame.nbytes
        return frame + sum(one.nbytes for one in columns) + sum(array.nbytes for array in beside)

    def copy(self) -> Table:
        """The same rows; whichever is written first gets arrays of its own."""
        if self.tail.keys.ahead:  # the copy has no more than the rows, or a copy of all the room
            width = self.tail.width
            found = self.each(lambda array: mx.contiguous(array[:, :, :width]))
        else:
            found = self.each(lambda array: array[...])
        found.make_ahead(self.tail.keys.ahead)
        found._placed, found._known = self._placed, list(self._known)
        return found


def _column(numbers: Sequence[int]) -> mx.array:
    return mx.array(list(numbers), mx.int32)[:, None, None]
