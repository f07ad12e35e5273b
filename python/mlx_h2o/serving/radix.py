"""A radix tree: what is kept under sequences of tokens, found by the beginnings that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

__all__ = ["RadixTree", "Tokens", "common"]

T = TypeVar("T")
Tokens = Sequence[int] | np.ndarray[Any, Any]


class RadixTree(Generic[T]):
    """A node: the tokens that lead to it from the one above, what is kept there, and the nodes
    below by their first token. Each of these but the root keeps something or branches."""

    def __init__(self, edge: Tokens = ()) -> None:
        self._edge, self._below = np.asarray(edge, np.int64), dict[int, RadixTree[T]]()
        self._value: T | None = None

    def put(self, tokens: Tokens, value: T) -> None:
        """Keep a value under these tokens, in place of one that is there."""
        node, rest = self, np.array(tokens, np.int64)
        while len(rest):
            below = node._below.setdefault(int(rest[0]), RadixTree(rest))
            shared = common(below._edge, rest)
            if shared < len(below._edge):
                fork = node._below[int(rest[0])] = RadixTree(below._edge[:shared])
                below._edge = below._edge[shared:]
                fork._below[int(below._edge[0])], below = below, fork
            node, rest = below, rest[shared:]
        node._value = value

    def remove(self, tokens: Tokens) -> None:
        """Let go of what is kept under these tokens."""
        *_, (_, node) = path = self._path(np.asarray(tokens, np.int64))
        node._value = None
        for (_, above), (_, node) in reversed([*pairwise(path)]):
            if node._value is None and len(node._below) < 2:
                above._below.pop(int(node._edge[0]))
                for only in node._below.values():
                    only._edge = np.concatenate([node._edge, only._edge])
                    above._below[int(only._edge[0])] = only

    def nearest(self, tokens: Tokens) -> Iterator[tuple[int, T]]:
        """All values that share at least one first token, those that share most first, each with
        how many it shares."""
        done = None
        for shared, node in reversed(self._path(np.asarray(tokens, np.int64))[1:]):
            ahead = [node]
            while ahead:
                one = ahead.pop()
                if one._value is not None:
                    yield shared, one._value
                ahead += [below for below in one._below.values() if below is not done]
            done = node

    def _path(self, tokens: np.ndarray[Any, Any]) -> list[tuple[int, RadixTree[T]]]:
        """Nodes down to the last that shares tokens, each with how many it shares."""
        found, shared, node = [(0, self)], 0, self
        while shared < len(tokens) and int(tokens[shared]) in node._below:
            node = node._below[int(tokens[shared])]
            more = common(node._edge, tokens[shared:])
            found.append((shared := shared + more, node))
            if more < len(node._edge):
                break
        return found


def common(one: Tokens, other: Tokens) -> int:
    """How many first tokens are the same."""
    size = min(len(one), len(other))
    differs = np.asarray(one)[:size] != np.asarray(other)[:size]
    return int(differs.argmax()) if differs.any() else size
