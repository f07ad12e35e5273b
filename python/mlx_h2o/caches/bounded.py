"""Rows of one layer under a budget: when rows come and go, and what a trim does."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

from .. import policies
from ..config import H2OConfig
from ..stores.choice import empty_store
from ..stores.storage import Storage, Stored, tied
from . import handed_out
from .attended import AttendedRows
from .checks import check_rows, check_scored
from .eviction import Eviction
from .key_ranks import KeyRanks

__all__ = ["BoundedRows"]


class BoundedRows(AttendedRows):
    """At most ``config.max_kv_size`` rows per head at rest; each head chooses its own.

    A step is: evict on the scores so far, append, attend, take in the scores. Below the budget
    rows are in order. After evictions their order in memory means nothing, except that the rows
    of an update of several tokens are the last ones, in order.

    Attributes:
        config: the settings.
        name: what error messages call these rows, such as "qwen3 layer 3".
        policy: what ranks the rows.
        offset: tokens seen, which only ``trim`` lowers; RoPE is driven by it, not by ``size()``
            (AtomGradient 2026, sec. 3.3).
        evicted: rows per head that have gone.
        updates: how many there were, in this object.
        offset_before: the offset before the last of them.
    """

    def __init__(self, config: H2OConfig | None = None, *, name: str = "") -> None:
        self._configure(config if config is not None else H2OConfig(), name)
        self._store: Storage | None = None
        self.offset = 0
        self.evicted = 0

    def _configure(self, config: H2OConfig, name: str) -> None:
        self.config = config
        self.name = name
        self.policy = policies.build(config)
        self._unscored = False  # the last update still waits for its scores
        self._surplus = False  # rows of a chunk beyond the budget, to go at the next occasion
        self._length = 1  # tokens of the last update
        self._key_ranks: KeyRanks | None = None
        self.updates = 0
        self.offset_before: int = 0
        self._overwrote = False  # the last update wrote its one row over another

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """Evict what must go, append the new rows and return all rows for attention.

        One token at the full budget overwrites the row that goes, in each head its own slot.
        Several tokens are stored behind the others, so that bottom-right causal masks fit; what
        is then beyond the budget goes at the next occasion: an update, ``state``, ``size()``,
        ``nbytes`` or a copy.

        Args:
            keys: [B, H, L, D] with RoPE applied, L at least 1.
            values: [B, H, L, Dv].

        Returns:
            keys [B, H, N, D] and values [B, H, N, Dv]; for L > 1 the new rows are the last.
            Where rows are quantised and L is at most 8, both packed: words, scales and biases.

        Raises:
            ValueError: shapes or dtypes that do not match each other or the rows stored.
            RuntimeError: the policy needs scores and the last update got none.
        """
        check_rows(keys, values, self._store)
        self._check_scored()
        self._settle()
        self._begin()
        if self._store is None:
            self._store = empty_store(self.config, keys, values, self._described())
        self._append(self._store, keys, values)
        self._length = keys.shape[2]
        self.offset += keys.shape[2]
        self._surplus = keys.shape[2] > 1 and self._store.length > self.config.max_kv_size
        self._unscored = self.policy.needs_scores
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Stored, Stored]:
        """The rows as the last update returned them.

        For layers that share the rows of another. Raises ValueError while there are none.
        """
        if self._store is None:
            raise ValueError("[H2OKVCache.keys_and_values] there are no rows yet.")
        keys, values = self._store.handed(self._length)
        if not self._store.tied:
            # Whoever evaluates the keys evaluates these too: otherwise the graph of every step
            # would hang on them until the first eviction.
            known = self._known(self._store)
            beside = () if known is None else known.statistics
            keys = tied(keys, [self._store.positions, self._store.importance, *beside])
        handed_out.register(keys, self)
        return keys, values

    def newest_slots(self) -> mx.array:
        """uint32 [B, H, L]: where the rows of the last update lie, until anything else happens.

        Raises ValueError while there are none.
        """
        store = self._store
        if store is None:
            raise ValueError("[H2OKVCache.newest_slots] there are no rows yet.")
        batch, heads, length = store.positions.shape
        if not self._overwrote:
            slots = mx.arange(length - self._length, length, dtype=mx.uint32)
            return mx.broadcast_to(slots, (batch, heads, self._length))
        newest = mx.array(self.offset, mx.int32).reshape(-1, 1, 1) - 1
        return mx.argmax(store.positions == newest, axis=2, keepdims=True)

    def saved_order(self) -> mx.array | None:
        """Slots [B, H, N] in the order that a state has rows in; None: as they are."""
        return None

    @property
    def keys(self) -> Any:
        """The stored keys [B, H, N, D], or None. May be set to an array of the same shape.

        Where rows are quantised: their words, scales and biases.
        """
        return None if self._store is None else self._store.fetch()[0]

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._with_rows("keys").replace_keys(keys)
        self._forget_ranks()

    @property
    def values(self) -> Any:
        """The stored values [B, H, N, Dv], or None. May be set, as the keys."""
        return None if self._store is None else self._store.fetch()[1]

    @values.setter
    def values(self, values: Any) -> None:
        self._with_rows("values").replace_values(values)

    @property
    def scores(self) -> mx.array | None:
        """float32 [B, H, N]: what the policy accumulated for each row, NaN where nothing yet."""
        return None if self._store is None else self._store.importance

    @property
    def positions(self) -> mx.array | None:
        """int32 [B, H, N]: the place of each stored row in the sequence."""
        return None if self._store is None else self._store.positions

    def reset_scores(self) -> None:
        """Forget what was accumulated for every row, as if none had been scored yet."""
        self._settle()
        self._forget_ranks()
        if self._store is not None:
            store = self._store
            store.importance = mx.full(store.importance.shape, mx.nan, mx.float32)
            store.tied = False

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens, or all where there are fewer; returns how many.

        The rows are exact; the scores that the taken back queries gave to the others remain.

        Raises:
            ValueError: rows have been evicted, so that the earlier rows cannot be restored.
        """
        if not self.is_trimmable():
            raise ValueError(
                f"[H2OKVCache.trim] {self._described()} has evicted rows, expected one that has "
                "not: see is_trimmable()."
            )
        n = max(0, min(self.offset, n))
        if self._store is not None:
            self._store.truncate(self._store.length - n)
        self.offset -= n
        return n

    def is_trimmable(self) -> bool:
        """Whether ``trim`` is exact: until the first eviction, done or due, and not after."""
        return self.evicted == 0 and not self._surplus

    def size(self) -> int:
        """Rows stored per head, after the surplus of a chunk has gone."""
        self._settle()
        return 0 if self._store is None else self._store.length

    @property
    def nbytes(self) -> int:
        """Bytes stored, after the surplus of a chunk has gone: keys, values, scores, positions.

        And what keydiff keeps to rank rows in attention's pass: a norm per row, a sum per head.
        """
        self._settle()
        ranks = 0 if self._key_ranks is None else self._key_ranks.nbytes
        return ranks + (0 if self._store is None else self._store.nbytes)

    @property
    def attention_settings(self) -> dict[str, Any]:
        """What operations on the packed rows handed out must be told of them."""
        return {} if self._store is None else self._store.attention_settings

    @property
    def in_segments(self) -> bool:
        """Whether attention reads the rows in parts; the arrays handed out then serve others."""
        return self._store is not None and self._store.in_segments

    @property
    def needs_routing(self) -> bool:
        """Whether attention must be ours: it has to return scores, or to read packed rows."""
        return self.policy.needs_scores or self.config.kv_bits is not None

    def _begin(self) -> None:
        """Of an update, before anything changes that a later one depends on."""
        self.updates += 1
        self.offset_before = self.offset
        self._overwrote = False

    def _with_rows(self, name: str) -> Storage:
        if self._store is None:
            raise ValueError(f"[H2OKVCache.{name}] an array was set, but no rows are stored.")
        return self._store

    def _append(self, store: Storage, keys: mx.array, values: mx.array) -> None:
        added = keys.shape[2]
        if added > 1:
            self._compact(store, self.config.max_kv_size, added)
        elif store.length >= self._limit:
            if self.config.evict_every == 1:
                self._overwrote = True
                eviction = self._eviction(store, added)
                self._key_ranks = KeyRanks.through(self._key_ranks, eviction, keys, values)
                self.evicted += 1
                return
            self._compact(store, self.config.max_kv_size - 1, added)
        ranks = self._eviction(store, added).ranks
        known = self._known(store)
        store.append(keys, values, self.offset, self._limit, ranks)
        self._key_ranks = known and known.appended(store)

    def _compact(self, store: Storage, keep: int, added: int) -> None:
        excess = store.length - keep
        if excess > 0:
            eviction = self._eviction(store, added)
            self._key_ranks = KeyRanks.through_compaction(self._known(store), eviction, keep)
            self.evicted += excess

    def _forget_ranks(self) -> None:
        """What is known of the keys holds no longer."""
        self._key_ranks = None

    def _known(self, store: Storage) -> KeyRanks | None:
        """What is known of the keys of these rows."""
        known = self._key_ranks
        return known if known is not None and known.describes(store) else None

    def _eviction(self, store: Storage, added: int) -> Eviction:
        known = self._known(store)
        return Eviction(
            store=store,
            policy=self.policy,
            offset=self.offset,
            added=added,
            sink_size=self.config.sink_size,
            recent_size=cast(int, self.config.recent_size),
            shared_heads=self.config.shared_heads,
            ranked=known is not None and known.ranked,
        )

    def _settle(self) -> None:
        """Let the surplus of the last chunk go, with the recent window as it is at rest."""
        if self._store is None:
            return
        if self._surplus:
            self._check_scored()
            self._surplus = False
            self._compact(self._store, self.config.max_kv_size, 0)
        elif not self._unscored:
            self._store.rest(self._eviction(self._store, 0).ranks)

    def _check_scored(self) -> None:
        check_scored(self._unscored, self._described(), self.config.policy)

    def _described(self) -> str:
        return f"the cache of {self.name}" if self.name else "this cache"
