"""keydiff's ranks in the pass of attention: the mean key as one more query of each KV head.

The rows after an append are the rows before the next eviction. So the ranks that the next step
needs are logits of keys that this step's attention reads anyway, and only the sum of the normalised
keys and their norms must be known, which change by one row at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from .. import fast
from ..operations.buffers import gathered
from ..operations.key_statistics import inverse_norms_of
from ..operations.replace_requests import Statistics
from ..stores.storage import Storage, Stored
from . import stored_attention
from .eviction import Eviction

__all__ = ["AFRESH", "KeyRanks", "each_part", "packing_of", "pays", "ranks_of"]

AFRESH = 1024
"""Replacements after which the statistics are made anew, so that rounding does not add up."""

SECOND_READ_BYTES = 1 << 22
"""Keys of a sequence in one layer below which a CPU reads them again for every row that goes,
rather than to keep sums of them (benchmarks/keydiff_read.py)."""

GROUP_READ_BYTES = 1 << 24
"""The same where rows go in groups: the sums cost more there, the read comes once per group."""

DRAFT_READ_BYTES = 0
"""The same of drafts, where a second read gathers the rows that are committed: it never pays."""


def pays(queries: mx.array, keys: Stored, store: Storage, least: int) -> bool:
    """Whether ranks in the pass of attention can be had, for less than a second read of the keys.

    On a GPU always for less: the second read is a composition of many. So it is of packed keys on a
    CPU, which would be unpacked; of dense ones less than ``least`` bytes per sequence are read
    there in less time than it takes to hand out the operations on their sums
    (docs/decode-step.md).
    """
    parts = keys if isinstance(keys, tuple) else (keys,)
    if queries.dtype != parts[-1].dtype:  # of packed keys: their biases'
        return False
    if isinstance(keys, mx.array) and keys.shape[3] != store.key_layout.width:
        return False  # made of the stored rows, as latent attention does with a chunk
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    composed = on_gpu or isinstance(keys, tuple) or store.in_segments
    large = composed or sum(part.nbytes for part in parts) >= least * parts[0].shape[0]
    return large and parts[0].shape[1] == store.positions.shape[1]


@dataclass(frozen=True, eq=False)
class KeyRanks:
    """What is known of the stored keys of a layer.

    Attributes:
        statistics: as ``fast.key_statistics`` gives them, of the first rows; those behind have
            been appended since.
        positions: of the rows that they are of.
        ranked: whether the importance of these rows is their rank.
        replaced: rows per head that went since the statistics were made anew.
    """

    statistics: Statistics
    positions: weakref.ref[mx.array]
    ranked: bool = False
    replaced: int = 0

    @classmethod
    def of(cls, keys: Stored, store: Storage) -> KeyRanks:
        """Of the stored keys: reads them all."""
        if store.in_segments:
            found = [_statistics_of(one.keys, one.settings) for one in store.segments()]
            norms = mx.concatenate([part[1] for part in found], axis=2)
            statistics = sum((part[0] for part in found[1:]), start=found[0][0]), norms
        else:
            statistics = _statistics_of(keys, store.attention_settings)
        return cls(statistics, weakref.ref(store.positions))

    def describes(self, store: Storage) -> bool:
        """Whether the store holds the very rows that this is about."""
        return self.positions() is store.positions

    @property
    def length(self) -> int:
        """Rows that the statistics are of."""
        return self.statistics[1].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the sums and norms; the ranks are the importance that the store counts."""
        return sum(array.nbytes for array in self.statistics)

    @classmethod
    def attend(
        cls,
        known: KeyRanks | None,
        store: Storage,
        queries: mx.array,
        keys: Stored,
        values: Stored,
        *,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
        shared_heads: bool,
    ) -> tuple[mx.array, KeyRanks]:
        """Attention, whose output evaluates the ranks, now the importance of the store too.

        ``known`` is what was known so far, of these rows or of others.
        """
        if known is None or known.replaced >= AFRESH or not known.describes(store):
            known = cls.of(keys, store)
        known = known._with_appended(keys, store)
        key_sum, inverse_norms = known.statistics
        out, ranks = ranks_of(
            mx.expand_dims(key_sum, 2), inverse_norms, store, queries, keys, values,
            scale=scale, mask=mask, sinks=sinks, shared_heads=shared_heads,
        )  # fmt: skip
        ranks = mx.squeeze(ranks, 2)
        store.importance = ranks
        return mx.depends(out, [ranks, key_sum, inverse_norms]), replace(known, ranked=True)

    def _with_appended(self, keys: Stored, store: Storage) -> KeyRanks:
        """The rows that were appended taken in: reads those alone."""
        start = self.length
        if start == store.length:
            return self
        new = each_part(lambda part: part[:, :, start:], keys)
        key_sum, norms = _statistics_of(new, store.attention_settings)
        own_sum, own_norms = self.statistics
        return replace(
            self, statistics=(own_sum + key_sum, mx.concatenate([own_norms, norms], axis=2))
        )

    # What becomes of it as rows come and go

    def appended(self, store: Storage) -> KeyRanks | None:
        """Rows have come behind those that this described; in segments they have moved."""
        if store.in_segments:
            return None
        return replace(self, positions=weakref.ref(store.positions), ranked=False)

    @classmethod
    def offered(cls, known: KeyRanks | None, store: Storage) -> KeyRanks | None:
        """``known``, which the replacement that follows keeps up to date where it is whole."""
        whole = known is not None and known.describes(store) and known.length == store.length
        if known is not None and whole and known.replaced < AFRESH:
            store.key_statistics = known.statistics
        return known

    @classmethod
    def taken(cls, known: KeyRanks | None, store: Storage) -> KeyRanks | None:
        """What is known after the replacement: nothing, where the store kept nothing."""
        statistics, store.key_statistics = store.key_statistics, None
        if known is None or statistics is None or statistics is known.statistics:
            return None
        return cls(statistics, weakref.ref(store.positions), replaced=known.replaced + 1)

    @classmethod
    def through(
        cls, known: KeyRanks | None, eviction: Eviction, keys: mx.array, values: mx.array
    ) -> KeyRanks | None:
        """Replace the worst rows, and return what is known then."""
        if eviction.ranked or not eviction.store.in_segments:
            cls.offered(known, eviction.store)
        eviction.replace_worst(keys, values)
        return cls.taken(known, eviction.store)

    @classmethod
    def through_compaction(
        cls, known: KeyRanks | None, eviction: Eviction, keep: int
    ) -> KeyRanks | None:
        """Keep the best rows, and return what is known then; reads the rows that go."""
        store = eviction.store
        ranked = known is not None and known.ranked and known.describes(store)
        eviction = eviction._replace(ranked=ranked)
        if keep == 0 or known is None or not ranked or store.in_segments:
            eviction.compact(keep)
            return None
        gone = eviction.worst(store.length - keep)
        kept = eviction.best(keep, store.importance)
        key_sum, inverse_norms = known.statistics
        lost = each_part(lambda part: gathered(part, gone), store.fetch()[0])
        key_sum = key_sum - _statistics_of(lost, store.attention_settings)[0]
        statistics = key_sum, mx.take_along_axis(inverse_norms, kept, axis=2)
        store.keep(kept, ranks=store.importance, added=eviction.added)
        replaced = known.replaced + gone.shape[2]
        return cls(statistics, weakref.ref(store.positions), replaced=replaced)


def each_part(function: Callable[[mx.array], mx.array], rows: Stored) -> Stored:
    """``function`` of the array, or of each of the three of packed rows."""
    if isinstance(rows, tuple):
        return function(rows[0]), function(rows[1]), function(rows[2])
    return function(rows)


def packing_of(settings: dict[str, Any]) -> dict[str, Any]:
    """What an operation on keys alone must be told of them, of a store's settings."""
    return {name: settings[name] for name in ("bits", "group_size") if name in settings}


def _statistics_of(keys: Stored, settings: dict[str, Any]) -> Statistics:
    return fast.key_statistics(keys, **packing_of(settings))


def ranks_of(
    sums: mx.array,
    inverse_norms: mx.array,
    store: Storage,
    queries: mx.array,
    keys: Stored,
    values: Stored,
    *,
    scale: float,
    shared_heads: bool,
    **settings: Any,
) -> tuple[mx.array, mx.array]:
    """Attention, and the ranks of all rows by each of ``sums`` [B, H, E, D]: float32 [B, H, E, N].

    The directions of the sums go in as probes; of half precision as two parts, whose logits add up.
    """
    means = sums * mx.expand_dims(inverse_norms_of(sums), -1)
    probes = upper = means.astype(queries.dtype)
    halves = queries.dtype != mx.float32
    if halves:
        lower = (means - upper.astype(mx.float32)).astype(queries.dtype)
        probes = mx.concatenate([upper, lower], axis=2)
    out, logits = stored_attention.attention_with_probes(
        store, queries, keys, values, probes, scale=scale, **settings
    )
    if halves:
        count = sums.shape[2]
        logits = logits[:, :, :count] + logits[:, :, count:]
    ranks = logits * mx.expand_dims(inverse_norms * (-1 / scale), 2)
    if shared_heads:
        ranks = mx.broadcast_to(mx.mean(ranks, axis=1, keepdims=True), ranks.shape)
    return out, ranks
