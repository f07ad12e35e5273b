"""A column of rows: how the keys, or the values, of one layer are stored.

A row is quantised once, on arrival, and moved in packed form. A new row format is one subclass with
``encode`` and ``decode``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.composed.buffers import padded
from ..operations.requests import Parts as Parts

Layout = tuple[int, int, int, mx.Dtype]
"""B, H, row size and dtype of rows as they arrive."""

_STEP = 256
"""Buffers grow by this many rows at a time."""


class Column(ABC):
    """Rows [B, H, capacity, ...]; the table knows which slots are in use.

    ``parts`` are written in place and belong to the column alone, so what methods return are other
    array objects. Nothing is evaluated.
    """

    parts: Parts = ()
    bits: int | None = None
    """Bits of packed rows if attention can read them; None: it gets the result of ``decode``."""
    group_size: int | None = None
    sparse_v: float = 0.0
    """Weights below which attention skips packed values."""
    ahead: int = 0
    """Slots to allocate at once, with the first rows; 0: allocate as rows arrive."""
    _slots = 0
    """The capacity, if slots are allocated ahead: how many of them can be used so far."""

    @abstractmethod
    def encode(self, rows: mx.array) -> Parts:
        """Rows [B, H, L, D] in stored form."""

    @abstractmethod
    def decode(self, parts: Parts) -> mx.array:
        """Stored rows as an array [B, H, N, D], in the dtype in which they arrived."""

    def like(self, parts: Parts) -> Column:
        """A column of the same format with these parts."""
        found = copy.copy(self)
        found.parts, found.ahead, found._slots = parts, 0, 0
        return found

    @property
    def layout(self) -> Layout:
        """The layout of the stored rows: that of an unpacked row, which is not computed."""
        shapes = ((*part.shape[:2], 1, *part.shape[3:]) for part in self.parts)
        row = self.decode(tuple(map(mx.zeros, shapes, (part.dtype for part in self.parts))))
        batch, heads, _, width = row.shape
        return batch, heads, width, row.dtype

    @property
    def capacity(self) -> int:
        return self._slots if self.ahead else self.parts[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots; of those allocated ahead, only what takes memory."""
        if self.ahead:
            return sum(resolve().committed_bytes(part) for part in self.parts)
        return sum(part.nbytes for part in self.parts)

    def view(self, count: int) -> Parts:
        """The first ``count`` slots, in stored form."""
        if count == self.parts[0].shape[2]:
            return tuple([part[...] for part in self.parts])
        return tuple([part[:, :, :count] for part in self.parts])

    def given(self, parts: Parts) -> Any:
        """Stored rows as attention takes them: an array, or the parts of packed rows."""
        return self.decode(parts) if self.bits is None else parts

    def reserve(self, rows: int, limit: int) -> None:
        """Make room for ``rows``, and in advance for more, up to ``limit``."""
        if rows > self.capacity:
            ahead = min(-(-rows // _STEP) * _STEP, limit, self.ahead or limit)
            self.resize(max(rows, ahead))

    def resize(self, slots: int) -> None:
        """Have ``slots``. Those allocated ahead stay, but no more than these can be used."""
        if not self.ahead:
            self.parts = tuple(padded(part[:, :, :slots], slots, 0) for part in self.parts)
            return
        most = max(slots, self.ahead)
        if not slots <= self.parts[0].shape[2] <= most:
            self.parts = tuple(_in_room(part[:, :, :slots], most) for part in self.parts)
        self._slots = slots

    def give_back(self, rows: int) -> int:
        """Release memory after the first ``rows`` of slots allocated ahead; returns bytes."""
        return sum(resolve().discard_rows(part, rows) for part in self.parts if self.ahead)

    def each(self, change: Callable[[mx.array], mx.array]) -> Column:
        """A column whose parts are ``change`` of these."""
        return self.like(tuple(change(part) for part in self.parts))


class DenseColumn(Column):
    """Rows stored as they arrive."""

    def encode(self, rows: mx.array) -> Parts:
        return (rows,)

    def decode(self, parts: Parts) -> mx.array:
        return parts[0]

    def given(self, parts: Parts) -> mx.array:
        return parts[0]  # saves a call in every step


def _in_room(rows: mx.array, slots: int) -> mx.array:
    """Rows [B, H, n, width] copied to the first of ``slots``, allocated ahead."""
    room = resolve().reserved_rows((*rows.shape[:2], slots, rows.shape[3]), rows.dtype)
    if rows.shape[2]:
        room[:, :, : rows.shape[2]] = rows
    return room
