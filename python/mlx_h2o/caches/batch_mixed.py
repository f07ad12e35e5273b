"""The evicting cache of several sequences in mixed precision."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import mlx.core as mx

from ..config import H2OConfig
from .alike import Alike, parted
from .batch import BatchH2OKVCache
from .batch_masks import chunk_mask, decode_mask
from .batch_rows import Line
from .cache import H2OKVCache
from .grouped_rows import GroupedRows
from .quantized_cache import QuantizedH2OKVCache, evicting_cache

__all__ = ["BatchMixedH2OKVCache"]


class BatchMixedH2OKVCache(GroupedRows):
    """A :class:`BatchH2OKVCache` whose newest rows stay as they come (``config.dense_size``).

    Sequences hold unequal numbers of dense and of packed rows until they are at the budget, so that
    those which stand alike share arrays, and others have their own: see :class:`GroupedRows`.
    """

    def __init__(
        self, config: H2OConfig | None = None, batch_size: int = 0, *, name: str = ""
    ) -> None:
        super().__init__(config, batch_size, name=name)
        self._groups = [Alike.alone(place, self._empty()) for place in range(batch_size)]

    def _empty(self) -> H2OKVCache:
        return evicting_cache(self.config, name=self.name)

    @classmethod
    def _alone(cls, cache: H2OKVCache) -> BatchMixedH2OKVCache:
        rows = cache.size()
        alone = cls(cache.config, name=cache.name)
        alone._groups = [Alike.alone(0, cache)]
        alone._start([Line(tokens=cache.offset, rows=rows)])
        return alone

    def _join(self, batches: Sequence[BatchH2OKVCache]) -> None:
        groups, first = [], 0
        for batch in batches:
            assert isinstance(batch, BatchMixedH2OKVCache)
            for group in batch._groups:
                members = [first + member for member in group.members]
                # A copy: the other batch may go on by itself.
                cache = group.cache if batch is self else copy.deepcopy(group.cache)
                groups.append(Alike(members, cache, group.behind))
            first += len(batch._lines)
        lines = [Line(*astuple(line)) for batch in batches for line in batch._lines]
        self._groups = groups
        self._start(lines)

    def extract(self, index: int) -> H2OKVCache:
        """As ``BatchH2OKVCache.extract``."""
        self._check_index(index)
        self._settle()
        line = self._lines[index]
        (group,) = [group for group in self._groups if index in group.members]
        cache = group.part([group.members.index(index)]).cache
        cache.offset, cache.evicted = line.tokens, line.tokens - line.rows
        return cache

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """As ``BatchH2OKVCache.filter``."""
        keep = self._checked_indices(batch_indices)
        self._settle()
        place = {member: new for new, member in enumerate(keep)}
        whole = [group for group in self._groups if place.keys() >= set(group.members)]
        others = [group for group in self._groups if group not in whole]
        cut = [part for part in parted(others, place.__contains__) if part.members[0] in place]
        self._groups = [
            Alike([place[member] for member in group.members], group.cache, group.behind)
            for group in (*whole, *cut)
        ]
        self._start([Line(*astuple(self._lines[index])) for index in keep])

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """As ``BatchH2OKVCache.make_mask``."""
        self._check_window(window_size)
        self._settle()
        spans = [line.span(length) for line in self._lines]
        kept, before = self._before(spans, length)
        if length == 1:
            added = [stop - start for start, stop in spans]
            padding = [before + 1 - rows - new for rows, new in zip(kept, added, strict=True)]
            return decode_mask(padding, before + 1)
        padding = [before - rows for rows in kept]
        return chunk_mask(padding, spans, before, length, return_array=return_array)

    def size(self) -> int:
        """Rows stored per head of the longest sequence, after the surplus of a chunk has gone."""
        self._settle()
        return max((line.rows for line in self._lines), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes stored, after the surplus of a chunk has gone; no padding is stored."""
        return sum(group.cache.nbytes for group in self._groups)

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return all(group.cache.empty() for group in self._groups)

    def trim(self, n: int) -> int:
        """As ``BatchH2OKVCache.trim``."""
        self._check_trim()
        n = max(0, min(n, max((line.rows for line in self._lines), default=0)))
        for group in self._groups:
            group.cache.trim(n)
        for line in self._lines:
            line.tokens = line.rows = max(0, line.rows - n)
        self._count()
        return n

    @property
    def keys(self) -> Any:
        """The stored keys of each group, or None. May be set, as those of ``H2OKVCache``."""
        return None if self.empty() else [group.cache.keys for group in self._groups]

    @keys.setter
    def keys(self, keys: Any) -> None:
        for group, part in zip(self._groups, keys, strict=True):
            group.cache.keys = part

    @property
    def values(self) -> Any:
        """The stored values of each group, or None. May be set, as the keys."""
        return None if self.empty() else [group.cache.values for group in self._groups]

    @values.setter
    def values(self, values: Any) -> None:
        for group, part in zip(self._groups, values, strict=True):
            group.cache.values = part

    @property
    def state(self) -> tuple[Any, ...]:
        """The states of the groups, who is in them (JSON), name, lines and settings (JSON)."""
        self._settle()
        states = [group.cache.state for group in self._groups]
        members = json.dumps([[group.members, group.behind] for group in self._groups])
        lines = json.dumps([astuple(line) for line in self._lines])
        return (states, members, self.name, lines, json.dumps(asdict(self.config)))

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        if len(state) != 5:
            raise ValueError(
                f"[BatchH2OKVCache.state] found {len(state)} parts, expected 5: groups, members, "
                "name, lines, settings."
            )
        states, members, name, lines, settings = state
        self._configure(H2OConfig(**json.loads(settings)), name)
        self._store = None
        self._groups = [
            Alike(found, QuantizedH2OKVCache.from_state(one), behind)
            for one, (found, behind) in zip(states, json.loads(members), strict=True)
        ]
        self._start([Line(*line) for line in json.loads(lines)])
