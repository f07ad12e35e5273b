"""The evicting KV cache, with the members that mlx_lm asks of a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx

from ..config import H2OConfig
from ..stores.choice import quantized_store, restored_store
from .bounded import BoundedRows

if TYPE_CHECKING:
    from .batch import BatchH2OKVCache

__all__ = ["H2OKVCache"]

_STATE = ("keys", "values", "scores", "positions", "offset", "evicted", "unscored", "name")
_UNEQUAL = "unequal_budgets"


class H2OKVCache(BoundedRows):
    """Keys and values of one layer, of which a policy keeps ``config.max_kv_size`` rows.

    It takes the place of mlx_lm's KVCache, but is none: a subclass would inherit a batched form
    that does not evict. Updates and scores are :class:`BoundedRows`'s. Nothing is evaluated here.

    Args:
        config: the settings; None for the defaults.
        name: what error messages call this cache, such as "qwen3 layer 3".

    Raises:
        ValueError: ``config.kv_bits`` is set; that is for :class:`QuantizedH2OKVCache`.
    """

    _quantized: ClassVar[bool] = False
    _speculative: ClassVar[bool] = False

    def _configure(self, config: H2OConfig, name: str) -> None:
        if (config.kv_bits is not None) != self._quantized:
            expected = (
                "a number, or H2OKVCache" if self._quantized else "None, or QuantizedH2OKVCache"
            )
            raise ValueError(
                f"[{type(self).__name__}] kv_bits is {config.kv_bits}, expected {expected}."
            )
        if config.speculative and not self._speculative:
            raise ValueError(
                f"[{type(self).__name__}] speculative is {config.speculative}, expected 0, or a "
                f"Speculative{type(self).__name__}."
            )
        super()._configure(config, name)

    unequal_budgets = False
    """Whether other layers of the model have other budgets; a part of the state."""

    def take_settings(self, config: H2OConfig, *, unequal_budgets: bool) -> None:
        """Other settings for a cache that has seen no token. Raises ValueError otherwise."""
        if not self.empty():
            raise ValueError(f"[H2OKVCache.take_settings] {self._described()} is not empty.")
        self._configure(config, self.name)
        self.unequal_budgets = unequal_budgets

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self._store is None

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask for the next ``length`` tokens over the rows that their update will return.

        None for one token; for more "causal" (bottom-right aligned) or, with ``return_array``,
        bool [length, rows + length].

        Raises:
            ValueError: ``window_size`` is given; slots do not tell how old a row is. An array is
                asked for where other layers have other budgets: it would not fit them.
        """
        if window_size is not None:
            raise ValueError(
                f"[H2OKVCache.make_mask] window_size is {window_size}, expected None: "
                f"{self._described()} evicts rows, and cannot serve a sliding-window layer."
            )
        if length == 1:
            return None
        if not return_array:
            return "causal"
        if self.unequal_budgets:
            raise ValueError(
                f"[H2OKVCache.make_mask] {self._described()} is asked for an array mask, which the "
                "model uses for all layers, but their budgets are unequal: expected one budget."
            )
        before = 0 if self._store is None else min(self._store.length, self.config.max_kv_size)
        return mx.arange(before, before + length)[:, None] >= mx.arange(before + length)[None]

    @property
    def state(self) -> tuple[Any, ...]:
        """keys, values, scores, positions, offset, evicted, unscored, name, settings.

        The first four are None in an empty cache. Leaves are arrays, ints, bools and strings, so
        that mlx_lm can save them; the settings are JSON. Later updates do not change what was
        read. Surplus rows of a chunk go before.
        """
        self._settle()
        store = self._store
        rows = (None,) * 4 if store is None else (*store.fetch(), store.importance, store.positions)
        given = asdict(self.config)
        if self.unequal_budgets:  # else it is not there, and files are what they always were
            given[_UNEQUAL] = True
        settings = json.dumps(given)
        return (*rows, self.offset, self.evicted, self._unscored, self.name, settings)

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        # Also serves objects that were made without __init__.
        if len(state) != len(_STATE) + 1:
            raise ValueError(
                f"[H2OKVCache.state] found {len(state)} parts, expected {len(_STATE) + 1}: "
                f"{', '.join(_STATE)}, settings."
            )
        keys, values, importance, positions, offset, evicted, unscored, name, settings = state
        given = json.loads(settings)
        self.unequal_budgets = bool(given.pop(_UNEQUAL, False))
        self._configure(H2OConfig(**given), name)
        self._store = None
        if importance is not None:
            self._store = restored_store(self.config, keys, values, importance, positions)
        self.offset = int(offset)
        self.evicted = int(evicted)
        self._unscored = bool(unscored)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> H2OKVCache:
        """A cache with the given ``state``, settings included."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> H2OKVCache:
        copy = self.from_state(self.state)  # shares arrays: updates make new ones
        memo[id(self)] = copy
        return copy

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchH2OKVCache:
        """One cache of several sequences, for batches: see ``BatchH2OKVCache.merge``."""
        from .batch import BatchH2OKVCache

        return BatchH2OKVCache.merge(caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> H2OKVCache:
        """The same rows, scores and positions in a cache that quantises: QuantizedH2OKVCache.

        Later rows are quantised as they come. This cache stays as it is.

        Raises:
            ValueError: ``bits`` or ``group_size`` that H2OConfig does not know as ``kv_bits`` and
                ``kv_group_size``; rows of a size that cannot be quantised.
            RuntimeError: a chunk still waits for its scores.
        """
        from .quantized_cache import QuantizedH2OKVCache

        config = replace(self.config, kv_bits=bits, kv_group_size=group_size)
        self._settle()
        cache = QuantizedH2OKVCache(config, name=self.name)
        cache.offset, cache.evicted, cache._unscored = self.offset, self.evicted, self._unscored
        cache.unequal_budgets = self.unequal_budgets
        if self._store is not None:
            cache._store = quantized_store(config, self._store, self._described())
        return cache
