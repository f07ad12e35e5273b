"""A column of rows: how the keys, or the values, of one layer are kept.

A new row format is one subclass with ``encode`` and ``decode``; nothing else here knows it.
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
"""B, H, the size of a row and its dtype, as rows come."""

_STEP = 256
"""Room grows by so many rows at a time."""


class Column(ABC):
    """Rows [B, H, capacity, ...], of which the table says which slots are in use.

    ``parts`` are written in place and belong to the column alone: whatever leaves it is another
    array object. Nothing is evaluated.
    """

    parts: Parts = ()
    bits: int | None = None
    """Bits of packed rows that attention reads; None: it gets what ``decode`` returns."""
    group_size: int | None = None
    sparse_v: float = 0.0
    """Weights below which attention skips packed values."""
    ahead: int = 0
    """Slots that are made at once, with the first rows; 0: as rows come."""
    _slots = 0
    """Slots allocated ahead that are still unused."""

    @abstractmethod
    def encode(self, rows: mx.array) -> Parts:
        """Rows [B, H, L, D] as they are kept."""

    @abstractmethod
    def decode(self, parts: Parts) -> mx.array:
        """Kept rows as an array [B, H, N, D], in the dtype in which they came."""

    def like(self, parts: Parts) -> Column:
        """Other rows that are kept the same way."""
        found = copy.copy(self)
        found.parts, found.ahead, found._slots = parts, 0, 0
        return found

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Of the rows that are there."""

    @property
    def capacity(self) -> int:
        return self._slots if self.ahead else self.parts[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, and of room for more where memory is taken for it."""
        if self.ahead:
            return sum(resolve().committed_bytes(part) for part in self.parts)
        return sum(part.nbytes for part in self.parts)

    def view(self, count: int) -> Parts:
        """Kept rows: the first ``count`` slots."""
        if count == self.parts[0].shape[2]:
            return tuple([part[...] for part in self.parts])
        return tuple([part[:, :, :count] for part in self.parts])

    def given(self, parts: Parts, as_array: bool) -> Any:
        """Kept rows as attention takes them: an array, or the parts of packed rows."""
        return self.decode(parts) if as_array or self.bits is None else parts

    def reserve(self, rows: int, limit: int) -> None:
        """Have room for so many rows, and in advance for more up to ``limit``."""
        if rows <= self.capacity:
            return
        if not self.ahead:
            self.parts = tuple(padded(part, _room(rows, limit), 0) for part in self.parts)
            return
        if rows > self.parts[0].shape[2]:  # all of it made once
            self.parts = tuple(_in_room(part, max(rows, self.ahead)) for part in self.parts)
        self._slots = min(_room(rows, limit), self.parts[0].shape[2])

    def give_back(self, rows: int) -> int:
        """Let go of the memory behind so many rows, of slots that were made at once: bytes."""
        return sum(resolve().discard_rows(part, rows) for part in self.parts if self.ahead)

    def resized(self, capacity: int) -> Column:
        """The first slots, up to ``capacity``, in arrays of their own of that size."""
        if self.ahead:
            self._slots = min(self._slots, capacity)
            most = max(self.ahead, capacity)
            if self.parts[0].shape[2] > most:
                self.parts = tuple(_in_room(part[:, :, :capacity], most) for part in self.parts)
            return self
        return self.each(lambda part: padded(part[:, :, :capacity], capacity, 0))

    def each(self, change: Callable[[mx.array], mx.array]) -> Column:
        """The rows whose arrays are ``change`` of these."""
        return self.like(tuple(change(part) for part in self.parts))


class DenseColumn(Column):
    """Rows as they come."""

    def encode(self, rows: mx.array) -> Parts:
        return (rows,)

    def decode(self, parts: Parts) -> mx.array:
        return parts[0]

    def given(self, parts: Parts, as_array: bool) -> mx.array:
        return parts[0]  # a call less in every step

    @property
    def layout(self) -> Layout:
        batch, heads, _, width = self.parts[0].shape
        return batch, heads, width, self.parts[0].dtype


def _in_room(rows: mx.array, slots: int) -> mx.array:
    """Rows [B, H, n, width] in the first of so many slots, made at once."""
    room = resolve().reserved_rows((*rows.shape[:2], slots, rows.shape[3]), rows.dtype)
    if rows.shape[2]:
        room[:, :, : rows.shape[2]] = rows
    return room


def _room(rows: int, limit: int) -> int:
    """Slots for so many rows, and in advance for more up to ``limit``."""
    return max(rows, min(-(-rows // _STEP) * _STEP, limit))


def packing_of(keys: Column, values: Column) -> dict[str, Any]:
    """What operations must be told of packed rows; nothing of arrays."""
    if keys.bits is None and values.bits is None:
        return {}
    bits = keys.bits or values.bits
    size = keys.group_size or values.group_size or 64
    found = {"bits": bits, "v_bits": values.bits or bits, "group_size": size}
    return found | {"sparse_v_threshold": values.sparse_v} if values.sparse_v else found
