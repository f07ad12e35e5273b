"""The evicting caches that can take drafted tokens back (``config.speculative``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..config import H2OConfig
from .asides import Aside, taken
from .batch_rows import mapped
from .cache import H2OKVCache
from .quantized_cache import QuantizedH2OKVCache
from .speculation import SpeculativeRows

__all__ = ["SpeculativeH2OKVCache", "SpeculativeQuantizedH2OKVCache", "cache_of", "class_of"]


def cache_of(config: H2OConfig, *, name: str = "") -> H2OKVCache:
    """An empty cache of the class that ``config`` asks for."""
    return class_of(config.kv_bits, config.speculative)(config, name=name)


def class_of(kv_bits: int | None, speculative: int) -> type[H2OKVCache]:
    """The class of caches with these settings."""
    plain, provisional = (
        (H2OKVCache, SpeculativeH2OKVCache)
        if kv_bits is None
        else (QuantizedH2OKVCache, SpeculativeQuantizedH2OKVCache)
    )
    return provisional if speculative else plain


class SpeculativeH2OKVCache(SpeculativeRows, H2OKVCache):
    """An :class:`H2OKVCache` whose last ``config.speculative + 1`` tokens are provisional.

    For mlx_lm's speculative decoding. It holds up to ``2 * speculative + 2`` rows per head beyond
    the budget, and what is needed to undo as many evictions.
    """

    _speculative = True

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """As ``H2OKVCache.make_mask``."""
        mask = super().make_mask(length, window_size, return_array)
        if not isinstance(mask, mx.array):
            return mask
        before = self._rows_before()
        return mx.arange(before, before + length)[:, None] >= mx.arange(before + length)[None]

    def _rows_before(self) -> int:
        """Rows of earlier tokens that the next update will return."""
        if self._store is None:
            return 0
        frontier = max(self._frontier, self.offset - self._reach)
        committed = self._committed(self._store) + frontier - self._frontier
        return min(committed, self.config.max_kv_size) + self.offset - frontier

    def saved_order(self) -> mx.array | None:
        """That of positions."""
        store = self._store
        return None if store is None or self._ordered else mx.argsort(store.positions, axis=2)

    @property
    def state(self) -> tuple[Any, ...]:
        """That of H2OKVCache, with the tokens committed, what the others say, and of whom (JSON).

        Rows are in the order of positions. What would undo commitments is not part of it: a cache
        that was saved can take back what is provisional.
        """
        base = H2OKVCache.state.fget(self)  # type: ignore[attr-defined]
        asides, store, slots = self._asides, self._store, self.saved_order()
        if store is not None and slots is not None:
            asides = tuple(aside.moved(slots, store.length) for aside in asides)
            base = (*tree_map(lambda array: taken(array, slots), base[:4]), *base[4:])
        if store is None or not asides:
            return (*base, self._frontier, None, "[]")
        seen = mx.concatenate([aside.wide(store.length) for aside in asides], axis=2)
        spans = [[aside.start, aside.stop] for aside in asides]
        return (*base, self._frontier, seen, json.dumps(spans))

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        if len(state) < 4:
            raise ValueError(f"[H2OKVCache.state] found {len(state)} parts, expected 12.")
        *base, frontier, seen, spans = state
        H2OKVCache.state.fset(self, base)  # type: ignore[attr-defined]
        self._frontier = int(frontier)
        asides, first = [], 0
        for start, stop in json.loads(spans):
            end = first + stop - start
            asides.append(Aside(start, seen[:, :, first:end], self._unseen))
            first = end
        self._asides = tuple(asides)

    def __deepcopy__(self, memo: dict[int, Any]) -> H2OKVCache:
        copy = super().__deepcopy__(memo)
        assert isinstance(copy, SpeculativeH2OKVCache)
        # The log speaks of slots, and nothing in it ever changes.
        copy._log, copy._asides = self._log, self._asides
        copy._ordered, copy._tail = self._ordered, self._tail
        if self._store is not None:
            copy._store = mapped(self._store, self.config, lambda array: array[...])
        return copy


class SpeculativeQuantizedH2OKVCache(SpeculativeH2OKVCache, QuantizedH2OKVCache):
    """A :class:`QuantizedH2OKVCache` whose last ``config.speculative + 1`` tokens are provisional.

    Provisional rows are quantised as they come, once; what is evicted is held as it is packed.
    """
