"""The evicting KV cache, with the members that mlx_lm asks of a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NoReturn, cast

import mlx.core as mx

from . import handed_out, policies
from .checks import check_replacement, check_rows, check_scores
from .config import H2OConfig
from .ema import MAX_QUERIES
from .eviction import Eviction
from .store import RowStore

__all__ = ["H2OKVCache"]

State = tuple[
    mx.array | None,
    mx.array | None,
    mx.array | None,
    mx.array | None,
    int,
    int,
    bool,
    str,
    str,
]


class H2OKVCache:
    """Keys and values of one layer, at most ``config.max_kv_size`` rows per head at rest.

    ``offset`` counts the tokens seen and drives RoPE; ``size()`` counts the rows stored
    (AtomGradient 2026, sec. 3.3). Each (sequence, KV head) chooses its rows by itself. Below the
    budget the rows are in order; after evictions their order in memory means nothing, except
    that the rows of the last multi-token update are the last ones, in order.

    A step is: evict on the scores so far, append, attend, take in the scores. Nothing is
    evaluated here, ever.

    Args:
        config: the settings; None for the defaults.
        name: what error messages call this cache, such as "qwen3 layer 3".
    """

    def __init__(self, config: H2OConfig | None = None, *, name: str = "") -> None:
        self._configure(config if config is not None else H2OConfig(), name)
        self._store: RowStore | None = None
        self.offset = 0
        self.evicted = 0

    def _configure(self, config: H2OConfig, name: str) -> None:
        self.config = config
        self.name = name
        self.policy = policies.build(config)
        self._unscored = False  # the last update still waits for its scores
        self._surplus = False  # rows of a chunk beyond the budget, to go at the next occasion

    # Updates

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Evict what must go, append the new rows and return all rows for attention.

        One token at the full budget overwrites the row that goes, in each head its own slot; the
        budget holds. Several tokens are stored behind the others, in order, so that bottom-right
        causal masks fit, and what is then beyond the budget goes at the next occasion: an update,
        ``state``, ``size()``, ``nbytes`` or a copy.

        Args:
            keys: [B, H, L, D] with RoPE applied, L at least 1.
            values: [B, H, L, Dv].

        Returns:
            keys [B, H, N, D] and values [B, H, N, Dv]; for L > 1 the new rows are the last.

        Raises:
            ValueError: shapes or dtypes that do not match each other or the rows stored.
            RuntimeError: the policy needs scores and the last update got none.
        """
        check_rows(keys, values, self._store)
        self._check_scored()
        self._settle()
        if self._store is None:
            self._store = RowStore.empty_like(keys, values)
        self._append(self._store, keys, values)
        self.offset += keys.shape[2]
        self._surplus = keys.shape[2] > 1 and self._store.length > self.config.max_kv_size
        self._unscored = self.policy.needs_scores
        return self.keys_and_values()

    def update_scores(self, scores: mx.array, *, masked: bool = True) -> None:
        """Take in the scores of the attention that followed an update.

        Layers that share their keys may call this several times for one update; each call counts
        as further queries. Policies that need no scores ignore it.

        Args:
            scores: float32 [B, Hq, L, N], logits before the softmax, -inf where masked, the
                queries in order, N the rows stored. Only the last 128 queries count.
            masked: False promises that no score is -inf, which saves work.

        Raises:
            ValueError: no rows yet, or another shape or dtype.
        """
        check_scores(scores, self._store)
        store = cast(RowStore, self._store)
        store.importance = self.policy.accumulate(
            store.importance, scores[:, :, -MAX_QUERIES:], masked=masked
        )
        self._unscored = False

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens, or all where there are fewer; returns how many.

        The rows are exact; the scores that the taken back queries gave to the others remain.

        Raises:
            ValueError: rows have been evicted, so that the earlier rows cannot be restored.
        """
        if not self.is_trimmable():
            raise ValueError(
                f"[H2OKVCache.trim] {self._described()} has evicted rows: expected a cache that "
                "has not, see is_trimmable()."
            )
        n = min(self.offset, n)
        if self._store is not None and n > 0:
            self._store.truncate(self._store.length - n)
            self.offset -= n
        return n

    # What attention and mlx_lm read

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows as the last update returned them: [B, H, N, D] and [B, H, N, Dv].

        For layers that share the rows of another. Raises ValueError while there are none.
        """
        if self._store is None:
            raise ValueError("[H2OKVCache.keys_and_values] there are no rows yet.")
        keys, values = self._store.fetch()
        # Whoever evaluates the keys evaluates these too: otherwise the graph of every step
        # would hang on them until the first eviction.
        keys = mx.depends(keys, [self._store.positions, self._store.importance])
        handed_out.register(keys, self)
        return keys, values

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask for the next ``N`` tokens over the rows that their update will return.

        None for one token; "causal" (bottom-right aligned) or, with ``return_array``, bool
        [N, rows + N] for more.

        Raises:
            ValueError: ``window_size`` is given; slots do not tell how old a row is.
        """
        if window_size is not None:
            raise ValueError(
                f"[H2OKVCache.make_mask] window_size is {window_size}, expected None: "
                f"{self._described()} evicts rows, and cannot serve a sliding-window layer."
            )
        if N == 1:
            return None
        if not return_array:
            return "causal"
        before = 0 if self._store is None else min(self._store.length, self.config.max_kv_size)
        return mx.arange(before, before + N)[:, None] >= mx.arange(before + N)[None]

    @property
    def keys(self) -> mx.array | None:
        """The stored keys [B, H, N, D], or None. May be set to an array of the same shape."""
        return None if self._store is None else self._store.fetch()[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        check_replacement("keys", keys, self._store).keys = keys

    @property
    def values(self) -> mx.array | None:
        """The stored values [B, H, N, Dv], or None. May be set to an array of the same shape."""
        return None if self._store is None else self._store.fetch()[1]

    @values.setter
    def values(self, values: mx.array) -> None:
        check_replacement("values", values, self._store).values = values

    @property
    def scores(self) -> mx.array | None:
        """float32 [B, H, N]: what the policy accumulated for each row, NaN before its first score."""
        return None if self._store is None else self._store.importance

    @property
    def positions(self) -> mx.array | None:
        """int32 [B, H, N]: the place of each stored row in the sequence."""
        return None if self._store is None else self._store.positions

    def size(self) -> int:
        """Rows stored per head, after the surplus of a chunk has gone."""
        self._settle()
        return 0 if self._store is None else self._store.length

    @property
    def nbytes(self) -> int:
        """Bytes stored, after the surplus of a chunk has gone: keys, values, scores, positions."""
        self._settle()
        return 0 if self._store is None else self._store.nbytes

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self._store is None

    def is_trimmable(self) -> bool:
        """Whether ``trim`` is exact: until the first eviction, done or due, and not after."""
        return self.evicted == 0 and not self._surplus

    # Copies and conversions

    @property
    def state(self) -> State:
        """keys, values, scores, positions (or four None), offset, evicted, unscored, name, settings.

        Leaves are arrays, ints, bools and strings, so that mlx_lm.models.cache can save them; the
        settings are JSON. What was read stays unchanged by later updates.
        """
        self._settle()
        settings = json.dumps(asdict(self.config))
        counts = (self.offset, self.evicted, self._unscored, self.name, settings)
        if self._store is None:
            return (None, None, None, None, *counts)
        keys, values = self._store.fetch()
        return (keys, values, self._store.importance, self._store.positions, *counts)

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        # Also serves objects that were made without __init__.
        if len(state) != 9:
            raise ValueError(f"[H2OKVCache.state] found {len(state)} parts, expected 9.")
        (
            keys,
            values,
            importance,
            positions,
            offset,
            evicted,
            unscored,
            name,
            settings,
        ) = state
        self._configure(H2OConfig(**json.loads(settings)), name)
        self._store = None if keys is None else RowStore(keys, values, importance, positions)
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
        copy = type(self).from_state(self.state)  # shares arrays, which updates never change
        memo[id(self)] = copy
        return copy

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> NoReturn:
        """Raises NotImplementedError: batches are not served in this version."""
        raise NotImplementedError(
            "[H2OKVCache.merge] batches of sequences are not available in this version: "
            "expected one sequence at a time."
        )

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> NoReturn:
        """Raises NotImplementedError: quantised rows are not available in this version."""
        raise NotImplementedError(
            f"[H2OKVCache.to_quantized] {bits}-bit rows are not available in this version: "
            "expected kv_bits=None."
        )

    # Eviction

    @property
    def _limit(self) -> int:
        """Rows at which a single-token step evicts."""
        return self.config.max_kv_size + self.config.evict_every - 1

    def _eviction(self, store: RowStore, added: int) -> Eviction:
        return Eviction(
            store=store,
            policy=self.policy,
            offset=self.offset,
            added=added,
            sink_size=self.config.sink_size,
            recent_size=cast(int, self.config.recent_size),
        )

    def _append(self, store: RowStore, keys: mx.array, values: mx.array) -> None:
        added = keys.shape[2]
        if added > 1:
            self._compact(store, self.config.max_kv_size, added)
        elif store.length >= self._limit:
            if self.config.evict_every == 1:
                self._eviction(store, added).replace_worst(keys, values)
                self.evicted += 1
                return
            self._compact(store, self.config.max_kv_size - 1, added)
        store.append(keys, values, self.offset, self._limit)

    def _compact(self, store: RowStore, keep: int, added: int) -> None:
        if store.length > keep:
            self.evicted += store.length - keep
            self._eviction(store, added).compact(keep)

    def _settle(self) -> None:
        """Let the surplus of the last chunk go, with the recent window as it is at rest."""
        if self._surplus and self._store is not None:
            self._check_scored()
            self._surplus = False
            self._compact(self._store, self.config.max_kv_size, 0)

    def _check_scored(self) -> None:
        if self._unscored:
            raise RuntimeError(
                f"[H2OKVCache] {self._described()} got no scores for its last update, and the "
                f"policy {self.config.policy!r} needs them: call the model within "
                "mlx_h2o.routing(model), or choose a policy that needs none."
            )

    def _described(self) -> str:
        return f"the cache of {self.name}" if self.name else "this cache"
