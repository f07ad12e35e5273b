"""A store keyed by tokens: found by the longest shared prefix, dropped in the order of last use."""

import heapq
import sys
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

import numpy as np

from ..lm.sharing import common

T = TypeVar("T")


@dataclass(eq=False)
class Entry(Generic[T]):
    """Content, its size, and the key of its tokens. A cuttable entry serves every prefix of them,
    any other only all of them."""

    key: bytes
    nbytes: int
    content: T
    cuttable: bool = False

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.key) // 4

    def serves(self, shared: int, asked: int) -> int:
        """How many leading tokens it serves, of ``asked`` tokens with its own ``shared`` in front;
        at least one is left to prefill."""
        if self.cuttable:
            return min(shared, asked - 1)
        return shared if shared == len(self) < asked else 0


class Kept(Generic[T]):
    """Entries sorted by their keys, so that those with the longest common prefix with a key stand
    next to its place.

    max_count: the most entries. nbytes: of all together. share: the least of a cuttable one that
    it serves for good, so that no other is needed: reading much more of it takes longer.
    """

    def __init__(self, max_count: int = sys.maxsize, share: float = 0) -> None:
        self._keys: list[bytes] = []
        self._entries: dict[bytes, Entry[T]] = {}  # used longest ago first
        self.max_count, self.share, self.nbytes = max_count, share, 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())

    def put(self, new: Entry[T]) -> list[Entry[T]]:
        """Add an entry in place of one with its key, and of needless ones; returns the latter."""
        gone = self._needless(new)
        for key in (new.key, *(one.key for one in gone)):
            self.drop(key)
        insort(self._keys, new.key)
        self._entries[new.key] = new
        self.nbytes += new.nbytes
        return gone

    def _needless(self, new: Entry[T]) -> list[Entry[T]]:
        """The cuttable entries of prefixes that a new cuttable one serves for good."""
        least = len(new) * (self.share if new.cuttable else 1)
        near = takewhile(lambda found: found[0] >= least, self.nearest(new.key))
        return [one for n, one in near if one.cuttable and n == len(one) < len(new)]

    def drop(self, key: bytes) -> None:
        """Remove the entry of this key, if there is one."""
        if (gone := self._entries.pop(key, None)) is not None:
            del self._keys[bisect_left(self._keys, key)]
            self.nbytes -= gone.nbytes

    def use(self, key: bytes) -> bool:
        """Mark the entry of this key as used last; returns whether there is one."""
        if key in self._entries:
            self._entries[key] = self._entries.pop(key)
        return key in self._entries

    def shrink(self, nbytes: int, new: Entry[T] | None = None) -> list[Entry[T]]:
        """Remove entries until ``max_count`` and ``nbytes`` are kept: those that a ``new`` one will
        make needless, then the least recently used; returns them."""
        gone, first = list[Entry[T]](), iter(self._needless(new) if new else ())
        while self._keys and (self.nbytes > nbytes or len(self) > self.max_count):
            gone.append(next(first, next(iter(self))))
            self.drop(gone[-1].key)
        return gone

    def best(self, key: bytes) -> tuple[int, Entry[T] | None]:
        """How many leading tokens of a key are served at most, and by which entry."""
        near = ((one.serves(shared, len(key) // 4), one) for shared, one in self.nearest(key))
        return next((found for found in near if found[0]), (0, None))

    def whole(self, key: bytes) -> Entry[T] | None:
        """An entry that serves all tokens of a key for good, if there is one."""
        near = takewhile(lambda found: found[0] == len(key) // 4, self.nearest(key))
        able = (one for n, one in near if n >= len(one) * self.share and one.serves(n, n + 1))
        return next(able, None)

    def nearest(self, key: bytes) -> Iterator[tuple[int, Entry[T]]]:
        """All entries that share a prefix with the key, after its length; the longest first."""

        def along(places: range) -> Iterator[tuple[int, Entry[T]]]:
            for place in places:
                one = self._keys[place]
                if not (shared := common(np.frombuffer(one, ">u4"), asked)):
                    return
                yield shared, self._entries[one]

        asked, at = np.frombuffer(key, ">u4"), bisect_left(self._keys, key)
        sides = along(range(at - 1, -1, -1)), along(range(at, len(self)))
        return heapq.merge(*sides, key=lambda found: found[0], reverse=True)


def key_of(tokens: Sequence[int]) -> bytes:
    """Big-endian, so that keys sort like their tokens."""
    return np.array(tokens, ">u4").tobytes()
