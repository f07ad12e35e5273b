"""Rows of one layer as a table: segments of keys and values, and other data of each row.

The rows of a sequence fill the first slots of each segment; slots after them are unused. Every
eviction, trim or departing sequence comes down to which rows go to which slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.composed.buffers import first_slots, padded
from .column import Change, Parts, Segment
from .frame import Frame
from .step import Step, per_sequence

POSITIONS, IMPORTANCE, BIAS = "positions", "importance", "bias"
"""Arrays beside the rows: their positions, where they do not follow from the number of tokens; what
the policy has accumulated; and, once rows have been folded, the bias ``ln n`` of a row that stands
for n."""
WAITING = {False: "waiting logits", True: "waiting weights"}
"""Pending scores of queries that may be taken back, by whether the policy needs weights."""
FILLS = {POSITIONS: -1, IMPORTANCE: math.nan, BIAS: 0.0}
FILLS |= {WAITING[False]: -math.inf, WAITING[True]: 0.0}
"""Values for unused slots, and for rows that a query has not seen."""


@dataclass(eq=False, repr=False)
class Table:
    """Rows of one sequence or several.

    Attributes:
        segments: the last one (the tail) takes new rows; the others hold packed rows of mixed
            precision and change as a whole. Empty: no token has been seen.
        tokens: how many tokens each sequence has seen.
        frame: the frame in which rows are stored; None: they are stored as they arrive.
        prefix: the shared rows before these, of batch 1, which never change.
        beside: arrays [B, H, slots, ...] of other data of each row, with as many slots as the
            segments have room for. ``POSITIONS`` may have fewer: rows of the tail whose position is
            missing or -1 are the newest of their sequence, in order.
        waiting: first position and number of queries of each run of pending scores.
        unscored: whether the last rows still wait for their attention.
        certain: how many first tokens may have lost rows, and so cannot be taken back.
        packed_width: slots before the tail.
        shown: slots that attention reads: those in use, and after an append with padding as many
            as if there were none.
        free: tokens that can be appended before anything else is due.
        changed: whether there are new arrays that attention does not read.
    """

    segments: list[Segment]
    tokens: list[int]
    frame: Frame | None = None
    prefix: Segment | None = None
    beside: dict[str, mx.array] = field(default_factory=dict)
    waiting: Sequence[tuple[int, int]] = ()
    unscored: bool = False
    certain: int = 0

    def __post_init__(self) -> None:
        self.packed_width = sum(segment.width for segment in self.segments[:-1])
        self.shown, self.free, self.changed = self.width, 0, True

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
        batch, heads = self.segments[-1].parts[0].shape[:2]
        return batch, heads

    @property
    def layouts(self) -> list[tuple[Any, ...]]:
        """B, H, row size and dtype of keys and values as they arrive; empty before the first."""
        if not self.segments:
            return []
        row = self.tail.row
        sizes = self.frame.sizes if self.frame else [one.shape[3] for one in row]
        return [(*one.shape[:2], size, one.dtype) for one, size in zip(row, sizes, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; of slots allocated ahead, only what takes memory."""
        held = [*self.segments, *([] if self.prefix is None else [self.prefix])]
        arrays = [*self.beside.values(), *([] if self.frame is None else self.frame.centres)]
        return sum(one.nbytes for one in held) + sum(array.nbytes for array in arrays)

    # Positions

    @property
    def positions(self) -> mx.array:
        """int32 [B, H, width]: the position of each row in its sequence, -1 in unused slots."""
        rows, placed = self.tail.rows, self.beside.get(POSITIONS)
        first = [seen - count for seen, count in zip(self.tokens, rows, strict=True)]
        if len(self.segments) == len({*zip(first, rows, strict=True)}) == 1:
            found = mx.arange(first[0], self.tokens[0])
        else:
            slots = mx.arange(-self.packed_width, self.tail.width)
            used = (slots >= 0) & (slots < _column(rows))
            found = mx.where(used, slots + _column(first), FILLS[POSITIONS])
        if placed is None:
            return mx.broadcast_to(found, (*self.shape, self.width))
        placed = padded(placed, self.width, FILLS[POSITIONS])
        return mx.where(placed < 0, found, placed)

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
        tail, length, frame = self.segments[-1], step.length, self.frame
        slots, width = tail.next_slots(), tail.width + length
        if frame is not None:
            if limit is not None:
                held = [count + self.prefix_rows for count in self.lengths]
                self.frame = frame = frame.starting(keys, values, step, held)
            keys, values = frame.into(keys, values)
        if step.spans or (slots is not None and length > 1):
            slots = step.slots(tail.rows)
        first = limit is not None and slots is None and not (tail.capacity or tail.ahead)
        if limit is not None and not first:
            tail.reserve(width, limit)
        found = [*tail.keys.encode(keys), *tail.values.encode(values)]
        if first:  # they get no spare slots
            found = [mx.contiguous(part) for part in found]
        elif slots is None:
            found = resolve().append_rows(tail.parts, found, width - length)
        else:
            found = resolve().put_each(tail.parts, slots, found)
        count = len(tail.parts)
        tail.parts, views = found[:count], found[count:] or first_slots(found, width)
        if limit is not None:
            for name, array in self.beside.items():
                if name != POSITIONS and array.shape[2] < self.packed_width + tail.capacity:
                    self.changed = True
                    self.attach(name, array)
        tail.use([*map(add, tail.rows, step.counts)])
        self.tokens = [*map(add, self.tokens, step.counts)]
        self.shown = self.packed_width + width
        return tail.sides(views)

    def attach(self, name: str, array: mx.array | None = None) -> None:
        """Store ``array`` [B, H, n, ...] beside the first n rows; None: fill all slots."""
        array = mx.zeros((*self.shape, 0)) if array is None else array
        tail = max(self.tail.width, self.tail.capacity)  # a copy has no room yet
        slots = 0 if name == POSITIONS else self.packed_width + tail
        self.beside[name] = padded(array, slots, FILLS[name])

    # Removing and moving rows

    def truncate(self, rows: Sequence[int]) -> None:
        """Keep the first ``rows`` of each sequence's tail."""
        self.changed = True
        self.tail.use(rows)
        self.shown = self.width
        if POSITIONS in self.beside:
            self.beside[POSITIONS] = self.beside[POSITIONS][:, :, : self.width]
        for name in self.beside:
            self.clear(name)

    def clear(self, name: str) -> None:
        """Reset what lies beside unused slots of the tail."""
        array, before, rows = self.beside[name], self.packed_width, self.tail.rows
        if self.tail.ragged:
            used = mx.arange(array.shape[2]) - before < _column(rows)
            used = mx.expand_dims(used, list(range(3, array.ndim)))
            self.beside[name] = mx.where(used, array, FILLS[name])
        elif before + rows[0] < array.shape[2]:
            array[:, :, before + rows[0] :] = FILLS[name]

    def fit(self, limit: int) -> None:
        """Cut the tail to ``limit`` slots, or to its rows if there are more."""
        slots = max(limit, self.tail.width)
        if self.tail.capacity > slots:
            self.tail.resize(slots)
            end = self.packed_width + slots
            self.beside = {name: mx.contiguous(a[:, :, :end]) for name, a in self.beside.items()}

    def filled(self, name: str) -> mx.array:
        """What is beside the rows in use, [B, H, width, ...], with the positions of all; if nothing
        is, what unused slots have."""
        if name == POSITIONS:
            return self.positions
        if name not in self.beside:
            return mx.full((*self.shape, self.width), FILLS[name], mx.float32)
        return self.beside[name][:, :, : self.width]

    # Other tables

    def arranged(
        self, segments: list[Segment], change: Callable[[mx.array, str], mx.array]
    ) -> Table:
        """A table of these segments; ``change`` makes what is beside their rows, by name."""
        found = replace(self, segments=segments, beside={})
        for name in dict.fromkeys((POSITIONS, *self.beside)):
            found.attach(name, change(self.filled(name), name))
        return found

    def copy(self) -> Table:
        """A table of the same rows; the one that is written first copies them."""
        if not self.segments:
            return replace(self)
        # Copy rows only: a copy of slots allocated ahead would take memory for all of them.
        end = self.tail.width if self.tail.ahead else None

        def own(array: mx.array) -> mx.array:
            return mx.contiguous(array[:, :, :end])

        beside = {name: own(array) for name, array in self.beside.items()}
        found = replace(self, segments=[one.each(own) for one in self.segments], beside=beside)
        found.tail.ahead = self.tail.ahead
        return found

    def standing(self, rows: int) -> Table:
        """The table of one sequence with its first ``rows`` as a shared prefix. All rows are in the
        first segment."""
        (first, *others), end = self.segments, self.width
        own = first.each(lambda part: mx.contiguous(part[:, :, rows:end]), [end - rows])
        found = self.arranged([own, *others], lambda array, _: mx.contiguous(array[:, :, rows:]))
        found.prefix = first.each(lambda part: mx.contiguous(part[:, :, :rows]), [rows])
        return found

    @property
    def whole(self) -> Table:
        """A table of all rows: each sequence has a copy of the prefix before its own rows."""
        prefix = self.prefix
        if prefix is None:
            return self
        (first, *others), places = self.segments, mx.arange(prefix.width)
        parts = map(behind, prefix.parts, first_slots(first.parts, first.width))
        both = first.like([*parts], [prefix.width + count for count in first.rows])

        def beside(own: mx.array, name: str) -> mx.array:
            shared = places if name == POSITIONS else mx.full(places.shape, FILLS[name], own.dtype)
            return behind(shared[None, None], own)

        found = self.arranged([both, *others], beside)
        found.prefix = None
        return found


def select(table: Table, sequences: Sequence[int]) -> Table:
    """A copy of some sequences in arrays of their own, without slots that none of them uses."""
    index = mx.array(list(sequences))
    rows = [[one.rows[n] for n in sequences] for one in table.segments]
    return _stacked([table], rows, [table.tokens[n] for n in sequences], lambda array: array[index])


def join(tables: Sequence[Table]) -> Table:
    """One table with the sequences of all ``tables``, in order, in arrays of its own."""
    tokens = [seen for table in tables for seen in table.tokens]
    like = next((table for table in tables if table.segments), None)
    if like is None:
        return Table([], tokens)
    found = [one if one.segments else _none_like(like, one.tokens) for one in tables if one.tokens]
    if len(found) == 1:
        return found[0].copy()
    same = zip(*(table.segments for table in found), strict=True)
    rows = [[count for one in parts for count in one.rows] for parts in same]
    return _stacked(found, rows, tokens, lambda array: array)


def _stacked(
    tables: Sequence[Table], rows: Sequence[list[int]], tokens: list[int], change: Change
) -> Table:
    """One table with the sequences that ``change`` makes of ``tables``, in order: ``rows`` of each
    sequence in each segment, without spare slots."""
    widths, segments = [max(one) for one in rows], []
    for place, (count, width) in enumerate(zip(rows, widths, strict=True)):
        same = [table.segments[place] for table in tables]
        parts = [
            mx.concatenate([padded(change(part)[:, :, :width], width, 0) for part in parts])
            for parts in zip(*(one.parts for one in same), strict=True)
        ]
        segments.append(same[0].like(parts, count))

    def spread(table: Table, name: str) -> mx.array:
        """What is beside the rows of a table, with each segment brought to its new width."""
        parts, start, array = [], 0, change(table.filled(name))
        for one, width in zip(table.segments, widths, strict=True):
            some = array[:, :, start : start + min(one.width, width)]
            parts.append(padded(some, width, FILLS[name]))
            start += one.width
        return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]

    found = Table(segments, tokens, None, tables[0].prefix)
    frames = [table.frame.each(change) for table in tables if table.frame is not None]
    found.frame = Frame.joined(frames) if frames else None
    found.unscored = any(table.unscored for table in tables)
    for name in dict.fromkeys((POSITIONS, *(name for table in tables for name in table.beside))):
        found.beside[name] = mx.concatenate([spread(table, name) for table in tables])
    return found


def _none_like(table: Table, tokens: list[int]) -> Table:
    """Sequences without rows, in the formats of ``table``."""
    index, rows = mx.zeros(len(tokens), mx.int32), [[0] * len(tokens) for _ in table.segments]
    return _stacked([table], rows, tokens, lambda array: array[index])


def behind(first: mx.array, own: mx.array) -> mx.array:
    """``own`` rows [B, H, N, ...] after the first ones, the same in every sequence."""
    shape = (*own.shape[:2], *first.shape[2:])
    return mx.concatenate([mx.broadcast_to(first, shape), own], axis=2)


def _column(numbers: Sequence[int]) -> mx.array:
    return per_sequence((*numbers,)).squeeze(3)
