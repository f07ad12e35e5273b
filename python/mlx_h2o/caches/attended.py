"""Attention over the rows of one layer: the output, and what the policy takes in of the scores."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from ..config import H2OConfig
from ..policies import Policy
from ..stores.known_worst import Zones, scored_attention
from ..stores.storage import Storage, Stored
from . import key_ranks, scoring, stored_attention
from .checks import check_attended, check_scores
from .key_ranks import KeyRanks

__all__ = ["AttendedRows"]


class AttendedRows:
    """Stored rows that attention reads; :class:`BoundedRows` says when rows come and go."""

    config: H2OConfig
    policy: Policy
    offset: int
    _store: Storage | None
    _unscored: bool
    """The last update still waits for its scores."""
    _length: int
    """Tokens of the last update."""
    _key_ranks: KeyRanks | None

    def update_scores(
        self, scores: mx.array, *, lse: mx.array | None = None, masked: bool = True
    ) -> None:
        """Take in the scores of the attention that followed an update.

        Layers that share their keys may call this several times for one update; each call counts
        as further queries. Policies that need no scores ignore it.

        Args:
            scores: float32 [B, Hq, L, N], logits before the softmax, -inf where masked, the
                queries in order, N the rows stored. Most policies count the last 128 queries only.
            lse: float32 [B, Hq, L], where the policy wants weights, ``exp(scores - lse)``; None:
                of these scores, which is right for attention without sinks.
            masked: False promises that no score is -inf, which saves work.

        Raises:
            ValueError: no rows yet, or another shape or dtype.
        """
        check_scores(scores, self._store)
        store = cast(Storage, self._store)
        store.importance = scoring.after_scores(self.policy, store, scores, lse=lse, masked=masked)
        self._unscored = False

    def attend(
        self,
        queries: mx.array,
        keys: Stored,
        values: Stored,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention over the rows of the last update, whose scores the policy takes in.

        As ``fast.scaled_dot_product_attention_with_scores`` followed by ``update_scores``, but
        where the policy allows it in one operation that need not store the scores. Evaluating
        the output evaluates both. At most 128 queries.

        Raises:
            ValueError: no rows yet, keys that are not the stored rows, or as the operation.
        """
        check_attended(keys, self._store)
        store = cast(Storage, self._store)
        if self.ranks_keys(queries, keys):
            shared = self.config.shared_heads
            out, self._key_ranks = KeyRanks.attend(
                self._key_ranks, store, queries, keys, values,
                scale=scale, mask=mask, sinks=sinks, shared_heads=shared,
            )  # fmt: skip
            return out
        heads = (keys[0] if isinstance(keys, tuple) else keys).shape[1]
        own_heads = heads == store.positions.shape[1]
        if self.policy.decay is not None and own_heads and not store.in_segments:
            self._unscored = False
            return scored_attention(
                store,
                self._next_zones(store),
                queries,
                keys,
                values,
                scale=scale,
                decay=self.policy.decay,
                mask=mask,
                sinks=sinks,
            )
        out, scores, lse = stored_attention.attention_with_scores(
            store, queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
        self.update_scores(scores, lse=lse, masked=mask is not None)
        tied: mx.array = mx.depends(out, [store.importance])
        return tied

    def _next_zones(self, store: Storage) -> Zones | None:
        """Those of the next step, where that will overwrite the row of the least importance."""
        due = self.config.evict_every == 1 and store.length >= self._limit
        alone = self.policy.ranked_by == "importance" and not self.config.shared_heads
        if not (due and store.takes_known and alone):
            return None
        return Zones(self.config.sink_size, self.offset + 1 - cast(int, self.config.recent_size))

    def ranks_keys(self, queries: mx.array, keys: Stored) -> bool:
        """Whether ``attend`` ranks the rows by their keys, in its one read of them."""
        return (
            self.policy.ranked_by == "key_diversity"
            and self._store is not None
            and self._evicts_next(self._store)
            and key_ranks.pays(queries, keys, self._store, self._second_read_bytes)
        )

    @property
    def _second_read_bytes(self) -> int:
        """Keys below which a second read of them costs less on a CPU."""
        groups = self.config.evict_every > 1
        return key_ranks.GROUP_READ_BYTES if groups else key_ranks.SECOND_READ_BYTES

    def _evicts_next(self, store: Storage) -> bool:
        """Whether the next eviction is due, and ranks the very rows that attention reads now."""
        if store.in_segments and self.config.evict_every > 1:
            return False  # nothing is known of rows that move as others come
        beyond = self._length > 1 and store.length > self.config.max_kv_size
        return beyond or store.length >= self._limit

    def score_chunk(
        self,
        queries: mx.array,
        keys: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> None:
        """Take in the scores of a long chunk, which its attention did not return.

        As ``update_scores`` with the scores of the queries that the policy counts; where it allows
        it they are computed in blocks, so that they are never in memory all at once.

        Raises:
            ValueError: no rows yet, keys that are not the stored rows, or as ``prefill_scores``.
        """
        check_attended(keys, self._store)
        store = cast(Storage, self._store)
        store.importance = scoring.after_chunk(
            self.policy, store, queries, keys, scale=scale, mask=mask, sinks=sinks
        )
        self._unscored = False

    @property
    def _limit(self) -> int:
        """Rows at which a single-token step evicts."""
        return self.config.max_kv_size + self.config.evict_every - 1
