"""The caches of a layer whose indexer and attention must hold the same rows (DeepSeek V3.2)."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..config import H2OConfig
from .batch import BatchH2OKVCache
from .cache import H2OKVCache
from .following import FollowingRows
from .speculative_cache import cache_of, class_of

__all__ = ["BatchLinkedH2OCache", "LinkedH2OCache"]

_SETTINGS = 8
"""Where the state of an :class:`H2OKVCache` has its settings."""


class _Linked:
    """Rows that a policy decides about, and those that follow them."""

    leader: Any
    _follower: FollowingRows

    def _lead(self, leader: Any) -> None:
        self.leader = leader
        self._follower = FollowingRows(leader)

    @property
    def caches(self) -> tuple[Any, Any]:
        """The leader and its follower."""
        return self.leader, self._follower

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    @property
    def offset(self) -> Any:
        """Tokens seen; of a batch int32 [B]."""
        return self.leader.offset

    def size(self) -> int:
        """Rows stored per head, after the surplus of a chunk has gone."""
        size: int = self.leader.size()
        return size

    def empty(self) -> bool:
        """Whether no token has been seen."""
        empty: bool = self.leader.empty()
        return empty

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        nbytes: int = self.leader.nbytes + self._follower.nbytes
        return nbytes

    def is_trimmable(self) -> bool:
        """Whether ``trim`` is exact, as the leader's."""
        trimmable: bool = self.leader.is_trimmable()
        return trimmable

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens of both, as the leader's."""
        taken: int = self.leader.trim(n)
        return taken

    @property
    def state(self) -> list[Any]:
        """The states of both."""
        return [self.leader.state, self._follower.state]

    def _restore(self, leader: Any, state: Sequence[Any]) -> None:
        self._lead(leader)
        self._follower.state = state[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        found = type(self).__new__(type(self))
        found._lead(copy.deepcopy(self.leader))
        store = found.leader._store
        if store is not None:
            store.companions = self.leader._store.companions  # updates make new ones
        memo[id(self)] = found
        return found


class LinkedH2OCache(_Linked):
    """An :class:`H2OKVCache` and the rows that follow it, in the place of a CacheList of two.

    The model reads ``cache[0]``, the latents that a policy decides about, and ``cache[1]``, the
    keys of its indexer, which picks rows by their slots: so both evict in lockstep.

    Args:
        config: the settings; None for the defaults.
        name: what error messages call this cache, such as "deepseek_v32 layer 3".
    """

    leader: H2OKVCache

    def __init__(self, config: H2OConfig | None = None, *, name: str = "") -> None:
        self._lead(cache_of(config or H2OConfig(), name=name))

    @property
    def state(self) -> list[Any]:
        """The states of both."""
        return super().state

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        if len(state) != 2:
            raise ValueError(f"[LinkedH2OCache.state] found {len(state)} parts, expected 2.")
        settings = json.loads(state[0][_SETTINGS])
        leader = class_of(settings["kv_bits"], settings["speculative"]).from_state(state[0])
        self._restore(leader, state)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> LinkedH2OCache:
        """A cache with the given ``state``, settings included."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchLinkedH2OCache:
        """One cache of several sequences, for batches: see ``BatchH2OKVCache.merge``."""
        return BatchLinkedH2OCache.merge(caches)


class BatchLinkedH2OCache(_Linked):
    """A :class:`BatchH2OKVCache` and the rows that follow it: a batch of linked caches.

    ``LinkedH2OCache.merge`` makes one, ``extract`` gives a sequence back.
    """

    leader: BatchH2OKVCache

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchLinkedH2OCache:
        """The sequences of linked caches; errors as of ``BatchH2OKVCache.merge``."""
        for cache in caches:
            if not isinstance(cache, LinkedH2OCache):
                raise ValueError(
                    f"[BatchLinkedH2OCache.merge] found a {type(cache).__name__}, expected "
                    "LinkedH2OCache only."
                )
        return cls._of(BatchH2OKVCache.merge([cache.leader for cache in caches]))

    @classmethod
    def _of(cls, leader: BatchH2OKVCache) -> BatchLinkedH2OCache:
        found = cls.__new__(cls)
        found._lead(leader)
        return found

    def extract(self, index: int) -> LinkedH2OCache:
        """The cache of one sequence, as ``BatchH2OKVCache.extract``."""
        found = LinkedH2OCache.__new__(LinkedH2OCache)
        found._lead(self.leader.extract(index))
        return found

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """As ``BatchH2OKVCache.filter``, of both."""
        self.leader.filter(batch_indices)

    def extend(self, other: BatchLinkedH2OCache) -> None:
        """As ``BatchH2OKVCache.extend``, of both."""
        if not isinstance(other, BatchLinkedH2OCache):
            raise ValueError(
                f"[BatchLinkedH2OCache.extend] found a {type(other).__name__}, expected a "
                "BatchLinkedH2OCache."
            )
        self.leader.extend(other.leader)

    def prepare(self, **padding: Any) -> None:
        """As ``BatchH2OKVCache.prepare``, of both."""
        self.leader.prepare(**padding)

    def finalize(self) -> None:
        """As ``BatchH2OKVCache.finalize``, of both."""
        self.leader.finalize()

    @property
    def state(self) -> list[Any]:
        """The states of both."""
        return super().state

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        if len(state) != 2:
            raise ValueError(f"[BatchLinkedH2OCache.state] found {len(state)} parts, expected 2.")
        self._restore(BatchH2OKVCache.from_state(state[0]), state)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> BatchLinkedH2OCache:
        """A cache with the given ``state``, settings included."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache
