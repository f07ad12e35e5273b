"""Sequences of a batch that stand alike, in one cache: put together, and told apart again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_map

from ..stores.choice import restored_store
from ..stores.mixed_store import MixedRowStore
from ..stores.storage import Storage
from .batch_rows import mapped
from .cache import H2OKVCache
from .quantized_cache import evicting_cache

__all__ = ["Alike", "grouped", "parted"]


@dataclass
class Alike:
    """Some sequences in one cache, without padding.

    members: which sequences of the batch, in the order of the cache.
    behind: by how much the positions of each, but for its sinks, are above the true ones: so that
        sequences of unequal length have one clock. Their order is what it was.
    """

    members: list[int]
    cache: H2OKVCache
    behind: list[int]

    @classmethod
    def alone(cls, member: int, cache: H2OKVCache) -> Alike:
        """One sequence."""
        return cls([member], cache, [0])

    @property
    def store(self) -> Storage | None:
        return self.cache._store

    @property
    def positions(self) -> mx.array | None:
        """int32 [B, H, N]: the true places of the rows in their sequences."""
        if self.store is None:
            return None
        back = [-behind for behind in self.behind]
        return _shifted(self.store, self.cache, back).positions

    def part(self, places: Sequence[int]) -> Alike:
        """The sequences at these places, which have one length: with their true positions."""
        chosen = list(places)
        (behind,) = {self.behind[place] for place in chosen}
        cache = _like(self.cache)
        cache.offset -= behind
        if self.store is not None:
            rows = _sequences(self.store, self.cache, chosen)
            cache._store = _shifted(rows, self.cache, [-behind] * len(chosen))
        return Alike([self.members[place] for place in chosen], cache, [0] * len(chosen))

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for those that may be one: at rest, the same sizes, and one clock or none.

        In a full cache of which each step replaces one row, ranks do not ask for positions but
        for their order, so that clocks can be set alike: but for a policy that draws lots by them.
        """
        cache, store = self.cache, self.store
        if store is None:
            return (cache.offset,)
        assert isinstance(store, MixedRowStore)
        sizes = (*(tier.length for tier in store.tiers), store.keys.shape[2])
        full = store.length >= cache._limit and store.keys.shape[2] == store.dense_size
        clocks = full and cache.config.evict_every == 1 and cache.config.policy != "random"
        due = cache._unscored or cache._surplus
        mine = tuple(self.members) if due else ()
        return (sizes, None if clocks else (cache.offset, *self.behind[:1]), mine)


def grouped(groups: Sequence[Alike]) -> list[Alike]:
    """The sequences in as few caches as may be."""
    by_form: dict[tuple[object, ...], list[Alike]] = {}
    for group in groups:
        by_form.setdefault(group.form, []).append(group)
    return [_joined(alike) for alike in by_form.values()]


def parted(groups: Sequence[Alike], apart: Callable[[int], object]) -> list[Alike]:
    """Groups of which all members have one value of ``apart``, and their true positions."""
    found = []
    for group in groups:
        places: dict[object, list[int]] = {}
        for place, member in enumerate(group.members):
            places.setdefault((apart(member), group.behind[place]), []).append(place)
        whole = len(places) == 1 and not any(group.behind)
        found += [group] if whole else [group.part(some) for some in places.values()]
    return found


def _joined(groups: list[Alike]) -> Alike:
    if len(groups) == 1:
        return groups[0]
    first = groups[0].cache
    cache = _like(first)
    cache.offset = max(group.cache.offset for group in groups)
    members = [member for group in groups for member in group.members]
    late = [cache.offset - group.cache.offset for group in groups]
    behind = [more + by for group, by in zip(groups, late, strict=True) for more in group.behind]
    if first._store is not None:
        cache._store = _concatenated(
            [
                _shifted(group.store, first, [by] * len(group.members))
                for group, by in zip(groups, late, strict=True)
                if group.store is not None
            ],
            first,
        )
    return Alike(members, cache, behind)


def _like(cache: H2OKVCache) -> H2OKVCache:
    """Of the same settings and at the same point, without rows."""
    made = evicting_cache(cache.config, name=cache.name)
    made.offset, made.evicted = cache.offset, cache.evicted
    made._unscored, made._surplus, made._length = cache._unscored, cache._surplus, cache._length
    return made


def _sequences(store: Storage, cache: H2OKVCache, places: list[int]) -> Storage:
    """Copies: views would hold the rows of all the others."""
    index = mx.array(places)
    return mapped(store, cache.config, lambda array: array[index])


def _shifted(store: Storage, cache: H2OKVCache, by: list[int]) -> Storage:
    if any(by):
        moved = store.positions + mx.array(by, mx.int32)[:, None, None]
        sinks = store.positions < cache.config.sink_size
        store = mapped(store, cache.config, lambda array: array)
        store.positions = mx.where(sinks, store.positions, moved)
    return store


def _concatenated(stores: list[Storage], cache: H2OKVCache) -> Storage:
    keys, values = tree_map(
        lambda *arrays: mx.concatenate(list(arrays)), *[store.fetch() for store in stores]
    )
    return restored_store(
        cache.config,
        keys,
        values,
        mx.concatenate([store.importance for store in stores]),
        mx.concatenate([store.positions for store in stores]),
    )
