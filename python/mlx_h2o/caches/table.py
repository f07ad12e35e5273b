"""Rows of one layer as a table: columns of keys and values, and other data of each row.

The rows of a sequence fill the first slots of each segment; slots after them are unused. Every
eviction, trim or departing sequence comes down to which rows go to which slots, and the columns
move them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import add
from typing import Any

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.composed.buffers import padded
from ..operations.segments import AttentionRows
from .column import Column, Layout, Parts
from .frame import Frame
from .step import Step, per_sequence

Change = Callable[[mx.array], mx.array]

NONE = -1
"""The position of an unused slot."""
IMPORTANCE, BIAS = "importance", "bias"
"""Arrays beside the rows: what the policy has accumulated, and, once rows have been folded, the
bias ``ln n`` of a row that stands for n."""
WAITING = {False: "waiting logits", True: "waiting weights"}
"""Pending scores of queries that may be taken back, by whether the policy needs weights."""
FILLS = {IMPORTANCE: math.nan, BIAS: 0.0, WAITING[False]: -math.inf, WAITING[True]: 0.0}
"""Values for unused slots, and for rows that a query has not seen."""


class Segment:
    """Rows in one format; ``rows`` of each sequence are in use, ``came`` of them appended since
    ``rows`` was set. ``ragged``: whether sequences have different numbers of rows. ``read`` caches
    what attention reads of a segment that does not change."""

    def __init__(self, keys: Column, values: Column, rows: list[int]) -> None:
        self.keys, self.values, self.rows = keys, values, rows
        self.read: AttentionRows | None = None

    @property
    def rows(self) -> list[int]:
        return [*map(self.came.__add__, self._set)]

    @rows.setter
    def rows(self, rows: Sequence[int]) -> None:
        self._set, self._most, self.came = (*rows,), max(rows), 0
        self.ragged = min(rows) != self._most

    @property
    def width(self) -> int:
        return self._most + self.came

    def next_slots(self) -> mx.array | None:
        """int32 [B, 1, 1, 1]: where the next row of each sequence goes; None: the same for all."""
        return per_sequence(self._set, self.came) if self.ragged else None

    @property
    def capacity(self) -> int:
        return min(self.keys.capacity, self.values.capacity)  # one that was set may be smaller

    def view(self, count: int) -> tuple[Parts, Parts]:
        """Keys and values of the first ``count`` slots, in stored form."""
        return self.keys.view(count), self.values.view(count)

    @property
    def state(self) -> tuple[Parts, Parts]:
        """The slots in use."""
        return self.view(self.width)

    def as_rows(self, shared: bool = False) -> AttentionRows:
        """What attention reads, cached: only for a segment that does not change."""
        if self.read is None:
            keys, values = self.state
            rows = self.keys.given(keys), self.values.given(values)
            self.read = AttentionRows(*rows, self.packing, shared)
        return self.read

    @property
    def packing(self) -> dict[str, Any]:
        """Arguments that tell operations how rows are packed; empty for arrays."""
        keys, values = self.keys, self.values
        bits = keys.bits or values.bits
        if bits is None:
            return {}
        size = keys.group_size or values.group_size or 64
        found = {"bits": bits, "v_bits": values.bits or bits, "group_size": size}
        return found | {"sparse_v_threshold": values.sparse_v} if values.sparse_v else found

    @property
    def parts(self) -> list[mx.array]:
        """The parts of the keys, then those of the values."""
        return [*self.keys.parts, *self.values.parts]

    @parts.setter
    def parts(self, parts: Sequence[mx.array]) -> None:
        count = len(self.keys.parts)
        self.keys.parts, self.values.parts = tuple(parts[:count]), tuple(parts[count:])

    def each(self, change: Change, rows: Sequence[int] = ()) -> Segment:
        """A segment of the same formats, whose arrays are ``change`` of these."""
        return Segment(self.keys.each(change), self.values.each(change), list(rows or self.rows))


class Table:
    """Rows of one sequence or several.

    Attributes:
        segments: the last one (the tail) takes new rows; the others hold packed rows of mixed
            precision and change as a whole. Empty: no token has been seen.
        tokens: how many tokens each sequence has seen.
        frame: the frame in which rows are stored; None: they are stored as they arrive.
        prefix: the shared rows before these, of batch 1, which never change.
        packed_width: slots before the tail.
        shown: slots that attention reads: those in use, and after an append with padding as many
            as if there were none.
        beside: arrays [B, H, slots, ...] of other data of each row, with as many slots as the
            segments have room for.
        waiting: first position and number of queries of each run of pending scores.
        unscored: whether the last rows still wait for their attention.
    """

    def __init__(
        self,
        segments: list[Segment],
        tokens: Sequence[int],
        frame: Frame | None = None,
        prefix: Segment | None = None,
    ) -> None:
        self.segments = segments
        self.tokens = list(tokens)
        self.frame = frame
        self.prefix = prefix
        self.packed_width = sum(segment.width for segment in segments[:-1])
        self.shown = self.width
        self.beside: dict[str, mx.array] = {}
        self.waiting: list[tuple[int, int]] = []
        self.unscored = False
        self.changed = False  # whether arrays have changed that attention does not read
        # Rows of the tail beyond ``_known`` have consecutive positions, which are not stored.
        self._placed: mx.array | None = None
        self._known = [0] * len(tokens)
        self._most = 0  # most rows in the tail since ``give_back``

    @property
    def tail(self) -> Segment:
        return self.segments[-1]

    @property
    def width(self) -> int:
        return self.packed_width + (self.segments[-1].width if self.segments else 0)

    @property
    def lengths(self) -> list[int]:
        """Rows of each sequence."""
        if len(self.segments) == 1:
            return self.segments[0].rows
        return [sum(rows) for rows in zip(*(one.rows for one in self.segments), strict=True)]

    @property
    def evicted(self) -> int:
        return sum(self.tokens) - self.prefix_rows * len(self.tokens) - sum(self.lengths)

    @property
    def prefix_rows(self) -> int:
        return 0 if self.prefix is None else self.prefix.width

    @property
    def shape(self) -> tuple[int, int]:
        """B and H."""
        batch, heads = self.segments[-1].keys.parts[0].shape[:2]
        return batch, heads

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of keys and values as they arrive; empty before the first."""
        if not self.segments:
            return ()
        found = self.tail.keys.layout, self.tail.values.layout
        if self.frame is None:
            return found
        pairs = zip(found, self.frame.sizes, strict=True)
        return tuple((*one[:2], size, one[3]) for one, size in pairs)

    def loose(self, scored: bool) -> list[mx.array]:
        """Arrays that attention does not read, so that a step has to evaluate them explicitly.

        With ``scored``, attention updates the arrays beside the rows and ties them to its output.
        """
        placed = [] if self._placed is None else [self._placed]
        return placed if scored else [*self.beside.values(), *placed]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; of slots allocated ahead, only what takes memory."""
        held = [*self.segments, *([] if self.prefix is None else [self.prefix])]
        columns = [column for one in held for column in (one.keys, one.values)]
        arrays = [*self.loose(scored=False), *([] if self.frame is None else [self.frame.centre])]
        return sum(one.nbytes for one in columns) + sum(array.nbytes for array in arrays)

    # Positions

    @property
    def positions(self) -> mx.array:
        """int32 [B, H, width]: the position of each row in its sequence."""
        before, width, rows, known = self.packed_width, self.tail.width, self.tail.rows, self._known
        if len(set(zip(self.tokens, rows, known, strict=True))) == 1:
            if self._placed is not None and known == rows:
                return self._placed
            end = self.tokens[0]
            new = mx.arange(end - rows[0] + known[0], end, dtype=mx.int32)
            new = mx.broadcast_to(new, (*self.shape, new.size))
            return new if self._placed is None else mx.concatenate([self._placed, new], axis=2)
        slots = mx.arange(width, dtype=mx.int32)
        first = [seen - count for seen, count in zip(self.tokens, rows, strict=True)]
        found = mx.broadcast_to(slots + _column(first), (*self.shape, width))
        if self._placed is not None:
            placed = padded(self._placed[:, :, before:], width, NONE)[:, :, :width]
            found = mx.where(slots < _column(known), placed, found)
        found = mx.where(slots < _column(rows), found, NONE)
        if not before or self._placed is None:
            return found
        return mx.concatenate([self._placed[:, :, :before], found], axis=2)

    def place(self, positions: mx.array) -> None:
        """Remember the positions of all rows."""
        self.changed = True
        self._placed = positions
        self._known = list(self.tail.rows)

    def slots_of(self, sequence: int) -> mx.array:
        """uint32 [n]: the slots of a sequence's rows."""
        parts, start = [], 0
        for one in self.segments:
            parts.append(mx.arange(start, start + one.rows[sequence], dtype=mx.uint32))
            start += one.width
        return mx.concatenate(parts)

    # Appending rows

    def append(
        self, keys: mx.array, values: mx.array, step: Step, limit: int | None = None
    ) -> tuple[Parts, Parts]:
        """Append the rows [B, H, L, D] of a step to each sequence; padding goes after them, in
        slots that stay unused. Allocates ahead for up to ``limit`` rows; None: there is room.

        Returns the tail's slots in use, and those of padding, in the form of ``Segment.view``.
        """
        tail, length, spans, frame = self.segments[-1], step.length, step.spans, self.frame
        kept, others, slots, width = tail.keys, tail.values, tail.next_slots(), tail.width + length
        if frame is not None:
            if limit is not None:
                held = [count + self.prefix_rows for count in self.lengths]
                self.frame = frame = frame.starting(keys, step, held)
            keys, values = frame.into(keys, values)
        if spans or (slots is not None and length > 1):
            slots = per_sequence((*tail.rows,)) + step.places
        first = limit is not None and slots is None and not (tail.capacity or kept.ahead)
        if limit is not None and not first:
            for column in (kept, others):
                column.reserve(width, limit)
        found = [*kept.encode(keys), *others.encode(values)]
        if slots is None and not first:
            found = resolve().append_rows(tail.parts, found, width - length)
        else:
            if slots is None:  # the first rows get no spare slots
                found = [mx.contiguous(part) for part in found]
            else:
                found = resolve().put_each(tail.parts, slots, found)
            found += [part[:, :, :width] for part in found]
        count, middle = len(kept.parts), len(found) // 2
        kept.parts, others.parts = tuple(found[:count]), tuple(found[count:middle])
        views = tuple(found[middle : middle + count]), tuple(found[middle + count :])
        if limit is not None:
            for name, array in self.beside.items():
                if array.shape[2] < self.packed_width + kept.capacity:
                    self.changed = True
                    self.attach(name, array)
        if spans:
            tail.rows = [*map(add, tail.rows, step.counts)]
        tail.came += 0 if spans else length
        self.tokens = [*map(add, self.tokens, step.counts)]
        self.shown = self.packed_width + width
        return views

    def attach(self, name: str, array: mx.array | None = None) -> None:
        """Store ``array`` [B, H, n, ...] beside the first n rows; None: fill all slots."""
        array = mx.zeros((*self.shape, 0)) if array is None else array
        tail = max(self.tail.width, self.tail.keys.capacity)  # a copy has no room yet
        self.beside[name] = padded(array, self.packed_width + tail, FILLS[name])

    # Removing and moving rows

    def close_gaps(
        self,
        kept: mx.array,
        positions: mx.array,
        sequences: Sequence[int],
        rows: Sequence[int],
        start: int,
        tail: int,
    ) -> None:
        """Keep the rows at ``kept`` [b, H, K] of some sequences in the first slots, then ``tail``
        rows from slot ``start`` on; ``rows`` of each sequence remain. ``positions`` are those of
        all rows before.

        Only for a table of one segment.
        """
        parts, segment = self.tail.parts, self.tail
        buffers = [*parts, *self.beside.values(), positions]
        found = resolve().compact_rows(buffers, kept, sequences, start, tail)
        segment.parts, found = found[: len(parts)], found[len(parts) :]
        self.beside = dict(zip(self.beside, found[:-1], strict=True))
        self._cut(rows)
        self.place(found[-1][:, :, : self.width])

    def truncate(self, rows: Sequence[int]) -> None:
        """Keep the first ``rows`` of each sequence's tail."""
        self._cut(rows)
        self._known = [min(known, count) for known, count in zip(self._known, rows, strict=True)]
        if self._placed is not None:
            self._placed = self._placed[:, :, : self.packed_width + max(self._known)]

    def _cut(self, rows: Sequence[int]) -> None:
        """Keep ``rows`` of the tail in use, and reset what lies beside the others."""
        self.changed = True
        self._most = max(self._most, self.tail.width)
        self.tail.rows = rows
        self.shown, before = self.width, self.packed_width
        for name, array in self.beside.items():
            if len(set(rows)) == 1:
                if before + rows[0] < array.shape[2]:
                    array[:, :, before + rows[0] :] = FILLS[name]
                continue
            used = mx.arange(array.shape[2]) - before < _column(rows)
            used = mx.expand_dims(used, list(range(3, array.ndim)))
            self.beside[name] = mx.where(used, array, FILLS[name])

    def make_ahead(self, rows: int) -> None:
        """Let the next append allocate slots for this many rows of the tail at once."""
        self.tail.keys.ahead = self.tail.values.ahead = rows

    def give_back(self) -> None:
        """Release the memory after the rows, if slots were allocated ahead."""
        width, tail = self.tail.width, self.tail
        if self._most > width and tail.keys.give_back(width) + tail.values.give_back(width):
            self._most = width

    def fit(self, limit: int) -> None:
        """Cut the tail to ``limit`` slots, or to its rows if there are more."""
        keys, values = self.tail.keys, self.tail.values
        slots = max(limit, *self.tail.rows)
        if keys.capacity > slots:  # values have the same
            keys.resize(slots)
            values.resize(slots)
            end = self.packed_width + slots
            self.beside = {name: mx.contiguous(a[:, :, :end]) for name, a in self.beside.items()}

    # Other tables

    def arranged(
        self, segments: list[Segment], change: Callable[[mx.array, float | None], mx.array]
    ) -> Table:
        """A table of these segments. ``change`` makes what is beside their rows, and with None
        instead of what unused slots are filled with, their positions."""
        found = Table(segments, self.tokens, self.frame, self.prefix)
        found.waiting, found.unscored = self.waiting, self.unscored
        found.place(change(self.positions, None))
        for name, array in self.beside.items():
            found.attach(name, change(array, FILLS[name]))
        return found

    def copy(self) -> Table:
        """A table of the same rows; the one that is written first copies them."""
        if not self.segments:
            return Table([], self.tokens)
        # Copy rows only: a copy of slots allocated ahead would take memory for all of them.
        end = self.tail.width if self.tail.keys.ahead else None
        segments = [one.each(lambda part: mx.contiguous(part[:, :, :end])) for one in self.segments]
        found = self.arranged(segments, lambda array, _: array[:, :, :end])
        found.make_ahead(self.tail.keys.ahead)
        found._placed, found._known = self._placed, list(self._known)
        return found

    def standing(self, rows: int) -> Table:
        """The table of one sequence with its first ``rows`` as a shared prefix. All rows are in the
        first segment."""
        (first, *others), end = self.segments, self.width
        own = first.each(lambda part: mx.contiguous(part[:, :, rows:end]), [end - rows])
        found = self.arranged([own, *others], lambda array, _: mx.contiguous(array[:, :, rows:end]))
        found.prefix = first.each(lambda part: mx.contiguous(part[:, :, :rows]), [rows])
        return found

    @property
    def whole(self) -> Table:
        """A table of all rows: each sequence has a copy of the prefix before its own rows."""
        prefix = self.prefix
        if prefix is None:
            return self
        first, *others = self.segments
        rows, width = [prefix.width + count for count in first.rows], first.width
        both = first.each(lambda part: part[:, :, :width], rows)
        both.parts = [*map(behind, prefix.parts, both.parts)]
        found = self.arranged(
            [both, *others], lambda own, fill: self.behind_prefix(own[:, :, : self.width], fill)
        )
        found.prefix = None
        return found

    def behind_prefix(self, own: mx.array, fill: float | None) -> mx.array:
        """``own`` data [B, H, N] after that of the shared rows, which is ``fill``, or if None
        their positions."""
        count = self.prefix_rows
        first = (
            mx.arange(count, dtype=own.dtype) if fill is None else mx.full(count, fill, own.dtype)
        )
        return behind(first[None, None], own)


def behind(first: mx.array, own: mx.array) -> mx.array:
    """``own`` rows [B, H, N, ...] after the first ones, the same in every sequence."""
    shape = (*own.shape[:2], *first.shape[2:])
    return mx.concatenate([mx.broadcast_to(first, shape), own], axis=2)


def _column(numbers: Sequence[int]) -> mx.array:
    return per_sequence((*numbers,)).squeeze(3)
