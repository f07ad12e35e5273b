"""A column: how the keys, or the values, of one layer are stored; and a segment of rows, with both.

A row is quantised once, on arrival, and moved in packed form. A new row format is one subclass of
``Column`` with ``encode`` and ``decode``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.composed.buffers import first_slots, padded
from ..operations.requests import Parts as Parts
from ..operations.segments import AttentionRows
from .step import per_sequence

Change = Callable[[mx.array], mx.array]

_STEP = 256
"""Buffers grow by this many rows at a time."""


class Column(ABC):
    """How the keys, or the values, of a segment are stored: as one array or several."""

    bits: int | None = None
    """Bits of packed rows if attention can read them; None: it gets the result of ``decode``."""
    group_size: int | None = None
    sparse_v: float = 0.0
    """Weights below which attention skips packed values."""

    @abstractmethod
    def encode(self, rows: mx.array) -> Parts:
        """Rows [B, H, L, D] in stored form, arrays [B, H, L, ...]."""

    @abstractmethod
    def decode(self, parts: Parts) -> mx.array:
        """Stored rows as an array [B, H, N, D], in the dtype in which they arrived."""

    def given(self, parts: Parts) -> Any:
        """Stored rows as attention takes them: an array, or the parts of packed rows."""
        return self.decode(parts) if self.bits is None else parts


class DenseColumn(Column):
    """Rows stored as they arrive."""

    def encode(self, rows: mx.array) -> Parts:
        return (rows,)

    def decode(self, parts: Parts) -> mx.array:
        return parts[0]

    def given(self, parts: Parts) -> mx.array:
        return parts[0]  # saves a call in every step


class Segment:
    """Rows in one format.

    Attributes:
        keys, values: how they are stored.
        parts: arrays [B, H, capacity, ...] of the keys, then of the values. They are written in
            place and belong to the segment alone, so what methods return are other objects.
        rows: how many of each sequence are in use.
        width: the most of these.
        ragged: whether sequences have different numbers of rows.
        read: caches what attention reads of a segment that does not change.
        ahead: slots to allocate at once, with the next rows; 0: allocate as rows arrive.
        room: how many of the slots allocated ahead can be used so far.
    """

    def __init__(
        self, keys: Column, values: Column, sides: Sequence[Sequence[mx.array]], rows: Sequence[int]
    ) -> None:
        self.keys, self.values = keys, values
        self._peak = self.width = 0
        self.use(rows)
        self._of_keys = len(sides[0])
        self.parts = [*sides[0], *sides[1]]
        self.read: AttentionRows | None = None
        self.ahead = self.room = 0

    def use(self, rows: Sequence[int]) -> None:
        """Have the first ``rows`` of each sequence in use."""
        self._peak = max(self._peak, self.width)
        self.rows, self.width = [*rows], max(rows)
        self.ragged = min(rows) != self.width

    def next_slots(self) -> mx.array | None:
        """int32 [B, 1, 1, 1]: where the next row of each sequence goes; None: the same for all."""
        return per_sequence((*self.rows,)) if self.ragged else None

    def sides(self, parts: Sequence[mx.array]) -> tuple[Parts, Parts]:
        """The parts of the keys, and those of the values."""
        return tuple(parts[: self._of_keys]), tuple(parts[self._of_keys :])

    def like(self, parts: Sequence[mx.array], rows: Sequence[int]) -> Segment:
        """A segment of the same format with other rows."""
        return Segment(self.keys, self.values, self.sides(parts), rows)

    def each(self, change: Change, rows: Sequence[int] = ()) -> Segment:
        """A segment of the same format, whose arrays are ``change`` of these."""
        return self.like([*map(change, self.parts)], rows or self.rows)

    @property
    def row(self) -> tuple[mx.array, mx.array]:
        """A key and a value [B, H, 1, D] as ``decode`` returns them; nothing is computed."""
        shapes = ((*part.shape[:2], 1, *part.shape[3:]) for part in self.parts)
        keys, values = self.sides([*map(mx.zeros, shapes, (part.dtype for part in self.parts))])
        return self.keys.decode(keys), self.values.decode(values)

    # What attention reads

    def view(self, count: int | None = None) -> tuple[Parts, Parts]:
        """Keys and values of the first ``count`` slots, in stored form; None: of those in use."""
        return self.sides(first_slots(self.parts, self.width if count is None else count))

    def stored(self, side: str) -> Parts:
        """The "keys" or "values" in use."""
        return (*first_slots(self.sides(self.parts)[side == "values"], self.width),)

    def as_rows(self, shared: bool = False) -> AttentionRows:
        """What attention reads, cached: only for a segment that does not change."""
        if self.read is None:
            keys, values = self.view()
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

    # Room for more rows

    @property
    def capacity(self) -> int:
        slots = self.parts[0].shape[2], self.parts[-1].shape[2]
        return self.room if self.ahead else min(slots)  # of a side that was set, fewer

    @property
    def nbytes(self) -> int:
        """Bytes of all slots; of those allocated ahead, only what takes memory."""
        if self.ahead:
            return sum(map(resolve().committed_bytes, self.parts))
        return sum(part.nbytes for part in self.parts)

    def reserve(self, rows: int, limit: int) -> None:
        """Make room for ``rows``, and in advance for more, up to ``limit``."""
        if rows > self.capacity:
            more = min(-(-rows // _STEP) * _STEP, limit, self.ahead or limit)
            self.resize(max(rows, more))

    def resize(self, slots: int) -> None:
        """Have ``slots``. Those allocated ahead stay, but no more than these can be used."""
        if not self.ahead:
            self.parts = [padded(part[:, :, :slots], slots, 0) for part in self.parts]
            return
        self.room, most = slots, max(slots, self.ahead)
        if not all(slots <= part.shape[2] <= most for part in self.parts):
            self.parts = [_in_room(part[:, :, :slots], most) for part in self.parts]

    def give_back(self) -> None:
        """Release the memory after the rows, if slots were allocated ahead."""
        width, discard = self.width, resolve().discard_rows
        if self.ahead and self._peak > width and sum(discard(part, width) for part in self.parts):
            self._peak = width


def _in_room(rows: mx.array, slots: int) -> mx.array:
    """Rows [B, H, n, width] copied to the first of ``slots``, allocated ahead."""
    room = resolve().reserved_rows((*rows.shape[:2], slots, rows.shape[3]), rows.dtype)
    if rows.shape[2]:
        room[:, :, : rows.shape[2]] = rows
    return room
