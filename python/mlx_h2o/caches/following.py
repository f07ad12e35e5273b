"""Rows that another cache decides about: the same positions in the same slots, always."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from ..operations.buffers import gathered, in_use, written
from ..stores.storage import Layout
from .bounded import BoundedRows

__all__ = ["FollowingRows"]


class FollowingRows:
    """Keys and values that go with the rows of a leader, such as an indexer's beside attention's.

    An update follows the leader's of the same tokens: what the leader evicted goes here too, and
    every row lies in the slot that the leader gave it. It has as many heads as the leader, or one
    that follows the leader's only one.

    Args:
        leader: the rows that a policy decides about.
    """

    def __init__(self, leader: BoundedRows) -> None:
        self.leader = leader
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self._positions: mx.array | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take in new rows [B, H, L, D] and [B, H, L, Dv] and return all, as the leader holds them.

        Raises:
            ValueError: shapes that do not match the rows stored or the leader's.
            RuntimeError: the leader has not had the same tokens before.
        """
        self._check(keys, values)
        added = keys.shape[2]
        if self.leader.offset != self.offset + added:
            raise RuntimeError(
                f"[FollowingRows.update_and_fetch] found {added} tokens after {self.offset}, "
                f"expected to follow the leader, which has had {self.leader.offset}."
            )
        heads = keys.shape[:2]
        new = mx.arange(self.offset, self.offset + added, dtype=mx.int32)
        new = mx.broadcast_to(new, (*heads, added))
        leading = cast(mx.array, self.leader.positions)
        before = self._positions
        if before is None or self._keys is None or self._values is None:
            self._keys, self._values, self._positions = keys, values, new
        elif self._replaces(added, before, leading):
            slot = mx.argmax(leading == self.offset, axis=2, keepdims=True)
            self._keys = written(self._keys, slot, keys)
            self._values = written(self._values, slot, values)
            self._positions = leading
        else:
            self._keys = mx.concatenate([self._keys, keys], axis=2)
            self._values = mx.concatenate([self._values, values], axis=2)
            self._positions = mx.concatenate([before, new], axis=2)
        self.offset += added
        self._follow()
        return in_use(self._keys, self._keys.shape[2]), in_use(self._values, self._values.shape[2])

    def _replaces(self, added: int, before: mx.array, leading: mx.array) -> bool:
        """Whether the leader wrote its one new row over one that is here too."""
        alone = added == 1 and self.leader.config.evict_every == 1
        return alone and before.shape == leading.shape

    def _follow(self) -> None:
        """Keep what the leader holds, in its order. Nothing to do where both have all rows."""
        leading, own = self.leader.positions, self._positions
        if leading is None or own is None or self._keys is None or self._values is None:
            return
        if leading.shape[2] == own.shape[2]:
            return
        # The leader's rows are some of ours: the n-th by position there is the n-th of them here.
        held = mx.any(own[..., None] == leading[:, :, None], axis=3)
        count = leading.shape[2]
        ours = mx.argsort(mx.where(held, own, mx.iinfo(mx.int32).max), axis=2)[:, :, :count]
        place = mx.argsort(mx.argsort(leading, axis=2), axis=2)
        slots = mx.take_along_axis(ours, place, axis=2)
        self._keys = gathered(self._keys, slots)
        self._values = gathered(self._values, slots)
        self._positions = leading

    def _check(self, keys: mx.array, values: mx.array) -> None:
        op = "[FollowingRows.update_and_fetch]"
        for name, array in (("keys", keys), ("values", values)):
            if array.ndim != 4 or 0 in array.shape[:3]:
                raise ValueError(f"{op} {name} have shape {array.shape}, expected [B, H, L, D].")
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(f"{op} keys and values have shapes {keys.shape} and {values.shape}.")
        for name, new, stored in (("keys", keys, self._keys), ("values", values, self._values)):
            if stored is not None and Layout.of(new) != Layout.of(stored):
                raise ValueError(f"{op} {name} are {Layout.of(new)}, expected {Layout.of(stored)}.")
        leading = self.leader.positions
        if leading is not None and leading.shape[:2] != keys.shape[:2]:
            raise ValueError(
                f"{op} keys have shape {keys.shape}, expected B, H = {leading.shape[:2]} as the "
                "leader."
            )

    @property
    def keys(self) -> mx.array | None:
        """The stored keys [B, H, N, D], or None. May be set to an array of the same shape."""
        self._follow()
        return None if self._keys is None else in_use(self._keys, self._keys.shape[2])

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._keys = _instead("keys", keys, self.keys)

    @property
    def values(self) -> mx.array | None:
        """The stored values [B, H, N, Dv], or None. May be set to an array of the same shape."""
        self._follow()
        return None if self._values is None else in_use(self._values, self._values.shape[2])

    @values.setter
    def values(self, values: mx.array) -> None:
        self._values = _instead("values", values, self.values)

    @property
    def positions(self) -> mx.array | None:
        """int32 [B, H, N]: the place of each stored row in the sequence."""
        self._follow()
        return self._positions

    @property
    def state(self) -> tuple[Any, ...]:
        """keys, values, positions and offset, after the leader's surplus has gone."""
        return self.keys, self.values, self.positions, self.offset

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        self._keys, self._values, self._positions, offset = state
        self.offset = int(offset)

    @property
    def nbytes(self) -> int:
        """Bytes stored: keys, values and positions."""
        return sum(a.nbytes for a in (self.keys, self.values, self.positions) if a is not None)

    def trim(self, n: int) -> None:
        """Take back the last ``n`` tokens, which are the last rows of a cache without evictions."""
        if self._keys is not None and self._values is not None and self._positions is not None:
            end = self._keys.shape[2] - n
            self._keys, self._values = self._keys[:, :, :end], self._values[:, :, :end]
            self._positions = self._positions[:, :, :end]
        self.offset -= n


def _instead(name: str, found: mx.array, stored: mx.array | None) -> mx.array:
    if stored is None or found.shape != stored.shape or found.dtype != stored.dtype:
        expected = "none, before any update" if stored is None else f"{stored.dtype} {stored.shape}"
        raise ValueError(
            f"[FollowingRows.{name}] found {found.dtype} {found.shape}, expected {expected}."
        )
    return found
