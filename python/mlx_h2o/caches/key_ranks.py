"""keydiff's ranks in the pass of attention: the mean key as one more query of each KV head.

The rows after an append are the rows before the next eviction. So the ranks that the next step
needs are logits of keys that this step's attention reads anyway, and only the sum of the normalised
keys and their norms must be known, which change by one row at a time.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from .. import fast
from ..operations.key_statistics import inverse_norms_of
from ..operations.replace_requests import Statistics
from ..stores.storage import Storage, Stored
from . import stored_attention
from .eviction import Eviction

__all__ = ["KeyRanks", "pays"]

_AFRESH = 1024
"""Replacements after which the statistics are made anew, so that rounding does not add up."""

SECOND_READ_BYTES = 1 << 21
"""Keys of one layer below which a CPU reads them again rather than to keep sums of them."""


def pays(queries: mx.array, keys: Stored, store: Storage) -> bool:
    """Whether ranks in the pass of attention can be had, for less than a second read of the keys.

    On a GPU always for less: the second read is a composition of many. So it is of packed keys on a
    CPU, which would be unpacked; of dense ones a few are read there in less time than it takes to
    hand out the operations on their sums (docs/decode-step.md).
    """
    parts = keys if isinstance(keys, tuple) else (keys,)
    if queries.dtype != parts[-1].dtype:  # of packed keys: their biases'
        return False
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    composed = on_gpu or isinstance(keys, tuple) or store.in_segments
    large = composed or sum(part.nbytes for part in parts) >= SECOND_READ_BYTES
    return large and parts[0].shape[1] == store.positions.shape[1]


@dataclass(frozen=True, eq=False)
class KeyRanks:
    """What is known of the stored keys of a layer.

    Attributes:
        statistics: as ``fast.key_statistics`` gives them.
        positions: of the rows that they are of.
        ranked: whether the importance of these rows is their rank.
        replaced: rows per head since the statistics were made anew.
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
        if known is None or not known.describes(store):
            known = cls.of(keys, store)
        key_sum, inverse_norms = known.statistics
        probes = _probes(key_sum, queries.dtype)
        out, logits = stored_attention.attention_with_probes(
            store, queries, keys, values, probes, scale=scale, mask=mask, sinks=sinks
        )
        ranks = mx.sum(logits, axis=2) * (inverse_norms * (-1 / scale))
        if shared_heads:
            ranks = mx.broadcast_to(mx.mean(ranks, axis=1, keepdims=True), ranks.shape)
        store.importance = ranks
        return mx.depends(out, [ranks, key_sum, inverse_norms]), replace(known, ranked=True)

    @classmethod
    def through(
        cls, known: KeyRanks | None, eviction: Eviction, keys: mx.array, values: mx.array
    ) -> KeyRanks | None:
        """Replace the worst rows, and return what is known then.

        Nothing, where it was not known, where the store did not keep it up to date, and now and
        then, so that it is made anew.
        """
        store = eviction.store
        if known is not None and eviction.ranked and known.replaced < _AFRESH:
            store.key_statistics = known.statistics
        eviction.replace_worst(keys, values)
        statistics, store.key_statistics = store.key_statistics, None
        if known is None or statistics is None or statistics is known.statistics:
            return None
        return cls(statistics, weakref.ref(store.positions), replaced=known.replaced + 1)


def _statistics_of(keys: Stored, settings: dict[str, Any]) -> Statistics:
    packing = {name: settings[name] for name in ("bits", "group_size") if name in settings}
    return fast.key_statistics(keys, **packing)


def _probes(key_sum: mx.array, dtype: mx.Dtype) -> mx.array:
    """The mean direction [B, H, E, D]; of half precision two parts, whose logits add up."""
    mean = mx.expand_dims(key_sum * mx.expand_dims(inverse_norms_of(key_sum), -1), 2)
    if dtype == mx.float32:
        return mean
    upper = mean.astype(dtype)
    lower = (mean - upper.astype(mx.float32)).astype(dtype)
    return mx.concatenate([upper, lower], axis=2)
