"""What is kept under sequences of tokens: found by the beginnings that they share, and let go of in
the order in which it was used."""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, TypeVar

import numpy as np

from ..lm.sharing import common

T = TypeVar("T")


@dataclass(eq=False)
class Entry(Generic[T]):
    """Something of so many bytes, and the key of the tokens that it is kept under; one that can be
    cut is good for each beginning of these, another one for all of them."""

    key: bytes
    nbytes: int
    content: T
    cuttable: bool = False

    def __len__(self) -> int:
        """How many tokens."""
        return len(self.key) // 4

    def serves(self, shared: int, asked: int) -> int:
        """How many first tokens it is good for: of ``asked``, the first ``shared`` are its own;
        one stays to be read."""
        if self.cuttable:
            return min(shared, asked - 1)
        return shared if shared == len(self) < asked else 0


class Kept(Generic[T]):
    """Entries by their keys, which stand in order: those that share most with another key are next
    to the place where it would stand.

    max_count: how many there may be. nbytes: of all of them.
    """

    def __init__(self, max_count: int = sys.maxsize) -> None:
        self._keys: list[bytes] = []
        self._entries: dict[bytes, Entry[T]] = {}  # used longest ago first
        self.max_count, self.nbytes = max_count, 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())

    def put(self, entry: Entry[T]) -> None:
        """Keep an entry, in place of one that is there."""
        self.drop(entry.key)
        insort(self._keys, entry.key)
        self._entries[entry.key] = entry
        self.nbytes += entry.nbytes

    def drop(self, key: bytes) -> None:
        """Let go of the entry of this key, if there is one."""
        if (gone := self._entries.pop(key, None)) is not None:
            del self._keys[bisect_left(self._keys, key)]
            self.nbytes -= gone.nbytes

    def use(self, key: bytes) -> bool:
        """Have the entry of this key be the last to go; returns whether it is there."""
        if key in self._entries:
            self._entries[key] = self._entries.pop(key)
        return key in self._entries

    def shrink(self, nbytes: int) -> list[Entry[T]]:
        """Let go of entries until there are no more than may be, nor more bytes than that; returns
        them."""
        gone: list[Entry[T]] = []
        while self._keys and (self.nbytes > nbytes or len(self) > self.max_count):
            gone.append(next(iter(self)))
            self.drop(gone[-1].key)
        return gone

    def best(self, key: bytes) -> tuple[int, Entry[T] | None]:
        """What is good for most first tokens of a key, and for how many."""
        near = ((one.serves(shared, len(key) // 4), one) for shared, one in self.nearest(key))
        return next((found for found in near if found[0]), (0, None))

    def nearest(self, key: bytes) -> Iterator[tuple[int, Entry[T]]]:
        """All entries that share at least one first token, those that share most first, each with
        how many it shares."""

        def along(places: range) -> Iterator[tuple[int, Entry[T]]]:
            for place in places:
                one = self._keys[place]
                if not (shared := common(np.frombuffer(one, ">u4"), asked)):
                    return
                yield shared, self._entries[one]

        asked, at = np.frombuffer(key, ">u4"), bisect_left(self._keys, key)
        sides = along(range(at - 1, -1, -1)), along(range(at, len(self)))
        return heapq.merge(*sides, key=itemgetter(0), reverse=True)


def key_of(tokens: Sequence[int]) -> bytes:
    """Keys are in the order of their tokens."""
    return np.array(tokens, ">u4").tobytes()
