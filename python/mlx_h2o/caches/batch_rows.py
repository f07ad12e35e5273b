"""Stores of several sequences: cut apart, put together behind padding, and told from each other.

Padding is on the left, at position -1, with keys and values of zeros: the selection of rows ranks
it below every row, of padding the higher slot first, and attention masks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
from mlx.utils import tree_map

from ..config import H2OConfig
from ..stores.choice import restored_store
from ..stores.mixed_store import MixedRowStore
from ..stores.storage import Storage

__all__ = ["Line", "Shift", "joined", "mapped", "padded", "sliced"]

PADDING = -1


@dataclass
class Line:
    """Where one sequence of a batch stands.

    tokens: how many it has seen.
    rows: how many of them are stored.
    before: tokens of padding on the left that are still to come.
    remaining: tokens before padding on the right begins; None: there is none.
    """

    tokens: int = 0
    rows: int = 0
    before: int = 0
    remaining: int | None = None

    def span(self, length: int) -> tuple[int, int]:
        """Which of the next ``length`` tokens are its own: from, and up to."""
        start = min(self.before, length)
        left = length if self.remaining is None else self.remaining
        return start, min(length, start + left)

    def kept(self, added: int, config: H2OConfig) -> int:
        """Rows that stay before ``added`` tokens of its own come, as in a batch of one."""
        budget = config.max_kv_size
        if added > 1:
            return min(self.rows, budget)
        due = added == 1 and self.rows >= budget + config.evict_every - 1
        return budget - 1 if due else self.rows

    def advance(self, length: int) -> None:
        """Count ``length`` tokens as seen and stored."""
        start, stop = self.span(length)
        self.tokens += stop - start
        self.rows += stop - start
        self.before -= start
        if self.remaining is not None:
            self.remaining -= stop - start


class Shift(NamedTuple):
    """``by`` moves the rows of these positions, whose sequences are so far behind the longest."""

    positions: mx.array
    behind: list[int]
    by: mx.array


def mapped(store: Storage, config: H2OConfig, function: Callable[[mx.array], mx.array]) -> Storage:
    """A store of the arrays [B, H, rows, ...] that ``function`` makes of each array of rows."""
    keys, values = store.fetch()
    keys, values = tree_map(function, (keys, values))
    found = restored_store(
        config, keys, values, function(store.importance), function(store.positions)
    )
    found.companions = tuple(function(array) for array in store.companions)
    return found


def sliced(
    store: Storage, config: H2OConfig, members: Sequence[int], start: int, stop: int
) -> Storage:
    """The slots from ``start`` up to ``stop`` of some sequences."""
    some = list(members)
    if some == list(range(store.positions.shape[0])):
        if (start, stop) == (0, store.length):
            return store
        if isinstance(store, MixedRowStore) and start == 0:
            return store.first(stop)
        return mapped(store, config, lambda array: array[:, :, start:stop])
    if some == list(range(some[0], some[-1] + 1)):
        return mapped(store, config, lambda array: array[some[0] : some[-1] + 1, :, start:stop])
    index = mx.array(some)
    return mapped(store, config, lambda array: array[index, :, start:stop])


def padded(store: Storage, config: H2OConfig, length: int) -> Storage:
    """``length`` slots, of which the first are padding."""
    added = length - store.length
    if added == 0:
        return store
    keys, values = tree_map(lambda array: _behind(added, array, 0), store.fetch())
    importance = _behind(added, store.importance, mx.nan)
    positions = _behind(added, store.positions, PADDING)
    found = restored_store(config, keys, values, importance, positions)
    found.companions = tuple(_behind(added, array, 0) for array in store.companions)
    return found


def joined(parts: Sequence[tuple[Sequence[int], Storage]], config: H2OConfig) -> Storage:
    """One store of all parts, whose sequences go to the places given with them."""
    length = max(store.length for _, store in parts)
    stores = [padded(store, config, length) for _, store in parts]
    places = [place for members, _ in parts for place in members]
    if len(stores) == 1 and places == sorted(places):
        return stores[0]
    keys, values = tree_map(
        lambda *arrays: mx.concatenate(list(arrays)), *[store.fetch() for store in stores]
    )
    whole = restored_store(
        config,
        keys,
        values,
        mx.concatenate([store.importance for store in stores]),
        mx.concatenate([store.positions for store in stores]),
    )
    beside = zip(*(store.companions for store in stores), strict=True)
    whole.companions = tuple(mx.concatenate(list(arrays)) for arrays in beside)
    if places == sorted(places):
        return whole
    order = mx.array(sorted(range(len(places)), key=places.__getitem__))
    return mapped(whole, config, lambda array: array[order])


def _behind(count: int, array: mx.array, value: float) -> mx.array:
    shape = (*array.shape[:2], count, *array.shape[3:])
    return mx.concatenate([mx.full(shape, value, array.dtype), array], axis=2)
