"""The caches of a layer whose indexer and attention must hold the same rows (DeepSeek V3.2)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from ..config import H2OConfig
from .batch import BatchH2OKVCache
from .cache import H2OKVCache
from .checks import check_rows
from .quantized import QuantizedH2OKVCache, evicting_cache
from .stored import FOLLOWING, stored_rows


class FollowingRows:
    """Keys and values that go with the rows of a leader, such as an indexer's beside attention's.

    They lie beside the leader's rows in its table, which moves and drops whole rows. An update
    follows the leader's of the same tokens, and has as many heads.

    Args:
        leader: the cache that a policy decides about.
    """

    def __init__(self, leader: H2OKVCache) -> None:
        self.leader = leader
        self._followed = leader.updates
        self._before = leader.offset

    @property
    def offset(self) -> Any:
        """Tokens seen, as the leader counts them; during an update those before it."""
        if self._followed == self.leader.updates:
            self._before = self.leader.offset
        return self._before

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take in new rows [B, H, L, D] and [B, H, L, Dv] and return all, as the leader holds them.

        Raises:
            ValueError: shapes that do not match the rows stored or the leader's.
            RuntimeError: the leader has not had the same tokens before.
        """
        op, leader = "[FollowingRows.update_and_fetch]", self.leader
        table, added = leader._table, keys.shape[2] if keys.ndim == 4 else 0
        heads = keys.shape[:2] if table is None else table.shape
        like = (keys, values) if self.keys is None else (self.keys, self.values)
        layouts = [(*heads, *rows.shape[3:], rows.dtype) for rows in like]
        check_rows("FollowingRows", keys, values, layouts)
        if table is None or leader.updates != self._followed + 1 or leader._length != added:
            raise RuntimeError(
                f"{op} found {added} tokens after {self._followed} updates, expected to follow the "
                f"leader, which has had {leader.updates}."
            )
        if self.keys is None and leader.evicted + leader.size() > added:
            raise RuntimeError(
                f"{op} the leader has rows of before, which have none here, expected to follow it "
                "from its first."
            )
        for side, rows in (("keys", keys), ("values", values)):
            table.put_newest(FOLLOWING + side, rows)
        self._followed, self._before = leader.updates, leader.offset
        keys, values = (table.beside[FOLLOWING + side] for side in ("keys", "values"))
        return keys[:, :, : table.shown], values[:, :, : table.shown]

    keys, values = stored_rows("keys"), stored_rows("values")

    def _stored(self, side: str) -> mx.array | None:
        table = self.leader._table
        if table is None or FOLLOWING + side not in table.beside:
            return None
        return table.beside[FOLLOWING + side][:, :, : table.width]

    def _set(self, side: str, rows: mx.array) -> None:
        table, old = self.leader._table, self._stored(side)
        if table is None or old is None or (rows.shape, rows.dtype) != (old.shape, old.dtype):
            expected = "none, before any update" if old is None else f"{old.dtype} {old.shape}"
            raise ValueError(
                f"[FollowingRows.{side}] found {rows.dtype} {rows.shape}, expected {expected}."
            )
        table.beside[FOLLOWING + side][:, :, : table.width] = rows

    @property
    def nbytes(self) -> int:
        """Bytes stored, which the leader's count too."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    @property
    def positions(self) -> mx.array | None:
        """int32 [B, H, N]: the place of each stored row in the sequence."""
        return self.leader.positions

    @property
    def state(self) -> tuple[Any, ...]:
        """keys, values, positions and offset, to be read after the leader's, in its order."""
        keys = self.keys
        return keys, self.values, None if keys is None else self.positions, self.offset

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        table = self.leader._table
        if state[0] is not None and table is not None:
            for side, rows in zip(("keys", "values"), state, strict=False):
                table.attach(FOLLOWING + side, rows, 0.0)


_OF_LEADER = {
    "offset", "size", "empty", "nbytes", "flush", "is_trimmable", "trim", "prepare", "finalize"
}  # fmt: skip


class LinkedH2OCache:
    """An :class:`H2OKVCache` and the rows that follow it, in the place of a CacheList of two.

    The model reads ``cache[0]``, the latents that a policy decides about, and ``cache[1]``, the
    keys of its indexer, which picks rows by their slots. What mlx_lm asks, the leader answers.

    Args:
        config: the settings; None for the defaults.
        name: what error messages call this cache, such as "deepseek_v32 layer 3".
    """

    def __init__(self, config: H2OConfig | None = None, *, name: str = "") -> None:
        self._lead(evicting_cache(config or H2OConfig(), name=name))

    def _lead(self, leader: H2OKVCache) -> None:
        self.leader = leader
        self._follower = FollowingRows(leader)

    @classmethod
    def _of(cls, leader: H2OKVCache) -> Any:
        found = cls.__new__(cls)
        found._lead(leader)
        return found

    def __getattr__(self, name: str) -> Any:
        if name in _OF_LEADER:
            return getattr(self.leader, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def caches(self) -> tuple[H2OKVCache, FollowingRows]:
        """The leader and its follower."""
        return self.leader, self._follower

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    @property
    def state(self) -> list[Any]:
        """The states of both."""
        return [self.leader.state, self._follower.state]

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        if len(state) != 2:
            raise ValueError(f"[{type(self).__name__}.state] found {len(state)} parts, expected 2.")
        self._lead(self._restored(state[0]))
        self._follower.state = state[1]

    def _restored(self, state: Sequence[Any]) -> H2OKVCache:
        bits = json.loads(state[8])["kv_bits"]
        return (H2OKVCache if bits is None else QuantizedH2OKVCache).from_state(state)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Any:
        """A cache with the given ``state``, settings included."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchLinkedH2OCache:
        """The sequences of linked caches; errors as of ``BatchH2OKVCache.merge``."""
        for cache in caches:
            if not isinstance(cache, LinkedH2OCache):
                raise ValueError(
                    f"[BatchLinkedH2OCache.merge] found a {type(cache).__name__}, expected "
                    "LinkedH2OCache only."
                )
        leader = BatchH2OKVCache.merge([cache.leader for cache in caches])
        return cast(BatchLinkedH2OCache, BatchLinkedH2OCache._of(leader))


class BatchLinkedH2OCache(LinkedH2OCache):
    """A :class:`BatchH2OKVCache` and the rows that follow it: a batch of linked caches.

    ``LinkedH2OCache.merge`` makes one, ``extract`` gives a sequence back.
    """

    leader: BatchH2OKVCache

    def _restored(self, state: Sequence[Any]) -> H2OKVCache:
        return BatchH2OKVCache.from_state(state)

    def extract(self, index: int) -> LinkedH2OCache:
        """The cache of one sequence, as ``BatchH2OKVCache.extract``."""
        return cast(LinkedH2OCache, LinkedH2OCache._of(self.leader.extract(index)))

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """As ``BatchH2OKVCache.filter``, of both."""
        self.leader.filter(batch_indices)
        self._lead(self.leader)

    def extend(self, other: BatchLinkedH2OCache) -> None:
        """As ``BatchH2OKVCache.extend``, of both."""
        if not isinstance(other, BatchLinkedH2OCache):
            raise ValueError(
                f"[BatchLinkedH2OCache.extend] found a {type(other).__name__}, expected a "
                "BatchLinkedH2OCache."
            )
        self.leader.extend(other.leader)
        self._lead(self.leader)
