"""The evicting cache of several sequences, as mlx_lm's continuous batching asks for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import mlx.core as mx

from ..config import H2OConfig
from ..stores.choice import restored_store
from .batch_padding import PaddedRows
from .batch_rows import Line, joined, mapped, sliced
from .cache import H2OKVCache
from .merging import check_mergeable, differing
from .quantized_cache import evicting_cache

__all__ = ["BatchH2OKVCache"]

_STATE = ("keys", "values", "scores", "positions", "unscored", "name", "lines", "settings")


class BatchH2OKVCache(PaddedRows):
    """Several sequences of one layer, each of which evicts as it would alone.

    ``H2OKVCache.merge`` makes one, ``extract`` gives a sequence back. Updates and scores are
    :class:`BatchedRows`'s.
    """

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchH2OKVCache:
        """The sequences of caches of one sequence each, settings and evictions included.

        Raises:
            ValueError: no caches, settings that differ, caches of another class or of batches.
        """
        check_mergeable(caches)
        kind = cls._for(caches[0].config)
        batch = kind(caches[0].config, name=caches[0].name)
        batch._join([kind._alone(cache) for cache in caches])
        return batch

    @classmethod
    def _for(cls, config: H2OConfig) -> type[BatchH2OKVCache]:
        """The class that serves ``config``."""
        from .batch_mixed import BatchMixedH2OKVCache

        return BatchMixedH2OKVCache if config.dense_rows else cls

    @classmethod
    def _alone(cls, cache: H2OKVCache) -> BatchH2OKVCache:
        rows = cache.size()
        alone = cls(cache.config, name=cache.name)
        alone._store, alone._unscored = cache._store, cache._unscored
        if alone._store is not None:
            # A copy: the cache goes on by itself.
            alone._store = mapped(alone._store, cache.config, lambda array: array[...])
        alone._start([Line(tokens=cache.offset, rows=rows)])
        return alone

    def extract(self, index: int) -> H2OKVCache:
        """The cache of one sequence, without padding.

        Raises ValueError where there is no such sequence.
        """
        self._check_index(index)
        self._settle()
        line = self._lines[index]
        cache = evicting_cache(self.config, name=self.name)
        cache.offset, cache.evicted = line.tokens, line.tokens - line.rows
        if self._store is not None and line.tokens > 0:
            end = self._store.length
            one = sliced(self._store, self.config, [index], end - line.rows, end)
            # A copy: a view would hold the rows of all the others.
            cache._store = mapped(one, self.config, mx.contiguous)
            cache._unscored = self._unscored
        return cache

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self._lines):
            raise ValueError(
                f"[BatchH2OKVCache.extract] index is {index}, expected 0 to "
                f"{len(self._lines) - 1}, one of the sequences."
            )

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only some sequences, in the order given; none is allowed."""
        keep = self._checked_indices(batch_indices)
        self._settle()
        lines = [Line(*astuple(self._lines[index])) for index in keep]
        rows = max((line.rows for line in lines), default=0)
        if self._store is not None:
            end = self._store.length
            tokens = any(line.tokens for line in lines)
            chosen = sliced(self._store, self.config, keep, end - rows, end) if keep else None
            self._store = chosen if tokens else None
        self._start(lines)

    def _checked_indices(self, batch_indices: Sequence[int] | mx.array) -> list[int]:
        found: Any = (
            batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        )
        keep = [int(index) for index in found]
        wrong = [index for index in keep if not 0 <= index < len(self._lines)]
        if wrong:
            raise ValueError(
                f"[BatchH2OKVCache.filter] found the indices {wrong}, expected 0 to "
                f"{len(self._lines) - 1}."
            )
        return keep

    def extend(self, other: BatchH2OKVCache) -> None:
        """Add the sequences of another batch behind these.

        Raises ValueError for a cache of another kind or with other settings.
        """
        op = "[BatchH2OKVCache.extend]"
        if not isinstance(other, BatchH2OKVCache):
            raise ValueError(f"{op} found a {type(other).__name__}, expected a BatchH2OKVCache.")
        if other.config != self.config:
            raise ValueError(f"{op} {differing((self.config, other.config))}")
        self._settle()
        other._settle()
        self._join([self, other])

    def _join(self, batches: Sequence[BatchH2OKVCache]) -> None:
        """Become the sequences of all ``batches``, which are settled."""
        lines = [Line(*astuple(line)) for batch in batches for line in batch._lines]
        like = next((batch._store for batch in batches if batch._store is not None), None)
        unscored = any(batch._unscored for batch in batches)
        if like is not None:
            parts, first = [], 0
            for batch in batches:
                count = len(batch._lines)
                store = batch._store or mapped(like, self.config, _none_of(count))
                if count > 0:
                    parts.append((range(first, first + count), store))
                first += count
            self._store = joined(parts, self.config) if parts else None
        self._unscored = unscored
        self._start(lines)

    def is_trimmable(self) -> bool:
        """Whether ``trim`` is exact: until the first eviction, done or due, and not after."""
        self._settle()
        return self.evicted == 0

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens of every sequence, or all where one has fewer.

        Raises ValueError where rows have been evicted.
        """
        self._check_trim()
        n = max(0, min(n, 0 if self._store is None else self._store.length))
        if self._store is not None:
            self._store.truncate(self._store.length - n)
        for line in self._lines:
            line.tokens = line.rows = max(0, line.rows - n)
        self._count()
        return n

    def _check_trim(self) -> None:
        if not self.is_trimmable():
            raise ValueError(
                f"[BatchH2OKVCache.trim] {self._described()} has evicted rows, expected one that "
                "has not: see is_trimmable()."
            )

    @property
    def state(self) -> tuple[Any, ...]:
        """keys, values, scores, positions, unscored, name, lines, settings; the last two JSON."""
        self._settle()
        store = self._store
        rows = (None,) * 4 if store is None else (*store.fetch(), store.importance, store.positions)
        lines = json.dumps([astuple(line) for line in self._lines])
        return (*rows, self._unscored, self.name, lines, json.dumps(asdict(self.config)))

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        if len(state) != len(_STATE):
            raise ValueError(
                f"[BatchH2OKVCache.state] found {len(state)} parts, expected {len(_STATE)}: "
                f"{', '.join(_STATE)}."
            )
        keys, values, importance, positions, unscored, name, lines, settings = state
        self._configure(H2OConfig(**json.loads(settings)), name)
        self._store = None
        if importance is not None:
            self._store = restored_store(self.config, keys, values, importance, positions)
        self._unscored = bool(unscored)
        self._start([Line(*line) for line in json.loads(lines)])

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> BatchH2OKVCache:
        """A cache with the given ``state``, settings included."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchH2OKVCache:
        copy = self.from_state(self.state)  # shares arrays: updates make new ones
        memo[id(self)] = copy
        return copy


def _none_of(count: int) -> Any:
    """Makes of an array [B, H, N, ...] one of ``count`` sequences without rows."""
    return lambda array: mx.zeros((count, array.shape[1], 0, *array.shape[3:]), array.dtype)
