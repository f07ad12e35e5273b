"""The caches of a layer whose indexer and attention must hold the same rows (DeepSeek V3.2)."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from ..config import H2OConfig
from .cache import H2OKVCache
from .following import FollowingRows
from .quantized_cache import QuantizedH2OKVCache, evicting_cache

__all__ = ["LinkedH2OCache"]


class LinkedH2OCache:
    """An :class:`H2OKVCache` and the rows that follow it, in the place of a CacheList of two.

    The model reads ``cache[0]``, the latents that a policy decides about, and ``cache[1]``, the
    keys of its indexer, which picks rows by their slots: so both evict in lockstep.

    Args:
        config: the settings; None for the defaults.
        name: what error messages call this cache, such as "deepseek_v32 layer 3".
    """

    def __init__(self, config: H2OConfig | None = None, *, name: str = "") -> None:
        self.leader = evicting_cache(config or H2OConfig(), name=name)
        self._follower = FollowingRows(self.leader)

    @property
    def caches(self) -> tuple[Any, Any]:
        """The leader and its follower."""
        return self.leader, self._follower

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    @property
    def offset(self) -> int:
        """Tokens seen."""
        return self.leader.offset

    def size(self) -> int:
        """Rows stored per head, after the surplus of a chunk has gone."""
        return self.leader.size()

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self.leader.empty()

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.leader.nbytes + self._follower.nbytes

    def is_trimmable(self) -> bool:
        """Whether ``trim`` is exact: until the first eviction, and not after."""
        return self.leader.is_trimmable()

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens of both, as :meth:`H2OKVCache.trim`."""
        taken = self.leader.trim(n)
        self._follower.trim(taken)
        return taken

    @property
    def state(self) -> list[Any]:
        """The states of both."""
        return [self.leader.state, self._follower.state]

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        if len(state) != 2:
            raise ValueError(f"[LinkedH2OCache.state] found {len(state)} parts, expected 2.")
        packed = json.loads(state[0][-1])["kv_bits"] is not None
        self.leader = (QuantizedH2OKVCache if packed else H2OKVCache).from_state(state[0])
        self._follower = FollowingRows(self.leader)
        self._follower.state = state[1]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> LinkedH2OCache:
        """A cache with the given ``state``, settings included."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> LinkedH2OCache:
        found = self.from_state(copy.copy(self.state))
        memo[id(self)] = found
        return found

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> NoReturn:
        """Raises NotImplementedError: batches of linked caches are not served."""
        raise NotImplementedError(
            "[LinkedH2OCache.merge] batches are not served where an indexer picks rows by their "
            "slots: expected one sequence at a time."
        )
