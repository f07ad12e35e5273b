"""A store keyed by tokens: found by the longest shared prefix, dropped in the order of last use."""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
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

    max_count: the most entries. nbytes: of all entries together.
    """

    def __init__(self, max_count: int = sys.maxsize) -> None:
        self._keys: list[bytes] = []
        self._entries: dict[bytes, Entry[T]] = {}  # used longest ago first
        self.max_count, self.nbytes = max_count, 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())

    def put(self, new: Entry[T], at_least: int = 0) -> list[Entry[T]]:
        """Add an entry. It replaces one with the same key, and if it is cuttable, also cuttable
        ones of its prefixes with ``at_least`` tokens; returns these."""
        self.drop(new.key)
        near = takewhile(lambda one: new.cuttable and one[0] >= at_least, self.nearest(new.key))
        gone = [one for shared, one in near if one.cuttable and shared == len(one)]
        for one in gone:
            self.drop(one.key)
        insort(self._keys, new.key)
        self._entries[new.key] = new
        self.nbytes += new.nbytes
        return gone

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

    def shrink(self, nbytes: int) -> list[Entry[T]]:
        """Remove the least recently used entries until ``max_count`` and ``nbytes`` are kept;
        returns them."""
        gone: list[Entry[T]] = []
        while self._keys and (self.nbytes > nbytes or len(self) > self.max_count):
            gone.append(next(iter(self)))
            self.drop(gone[-1].key)
        return gone

    def best(self, key: bytes) -> tuple[int, Entry[T] | None]:
        """How many leading tokens of a key are served at most, and by which entry."""
        near = ((one.serves(shared, len(key) // 4), one) for shared, one in self.nearest(key))
        return next((found for found in near if found[0]), (0, None))

    def nearest(self, key: bytes) -> Iterator[tuple[int, Entry[T]]]:
        """All entries that share a prefix with the key, the longest prefix first, each with the
        length of that prefix."""

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
    """Big-endian, so that keys sort like their tokens."""
    return np.array(tokens, ">u4").tobytes()
