"""Rows that another cache decides about: the same positions in the same slots, always."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..operations.buffers import written
from ..stores.storage import Layout
from .asides import taken
from .bounded import BoundedRows

__all__ = ["FollowingRows"]


class FollowingRows:
    """Keys and values that go with the rows of a leader, such as an indexer's beside attention's.

    They lie in the leader's store, which moves, drops and brings back whole rows: so there is
    nothing to decide here, whether the leader holds one sequence, a batch, or provisional rows. An
    update follows the leader's of the same tokens. They have as many heads as the leader.

    Args:
        leader: the rows that a policy decides about.
    """

    def __init__(self, leader: BoundedRows) -> None:
        self.leader = leader
        self._followed = leader.updates

    @property
    def offset(self) -> Any:
        """Tokens seen, as the leader counts them; during an update those before it."""
        behind = self._followed != self.leader.updates
        return self.leader.offset_before if behind else self.leader.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take in new rows [B, H, L, D] and [B, H, L, Dv] and return all, as the leader holds them.

        Raises:
            ValueError: shapes that do not match the rows stored or the leader's.
            RuntimeError: the leader has not had the same tokens before.
        """
        self._check(keys, values)
        added = keys.shape[2]
        store, slots = self.leader._store, None
        if store is not None and self.leader.updates == self._followed + 1:
            slots = self.leader.newest_slots()
        if store is None or slots is None or slots.shape[2] != added:
            raise RuntimeError(
                f"[FollowingRows.update_and_fetch] found {added} tokens after {self._followed} "
                f"updates, expected to follow the leader, which has had {self.leader.updates}."
            )
        if store.companions:
            pairs = zip(store.companions, (keys, values), strict=True)
            store.companions = tuple(written(stored, slots, new) for stored, new in pairs)
        elif store.length == added:
            store.companions = keys, values
        else:
            raise RuntimeError(
                "[FollowingRows.update_and_fetch] the leader has rows of before, which have none "
                "here, expected to follow it from its first."
            )
        self._followed = self.leader.updates
        found_keys, found_values = store.companions
        return found_keys[...], found_values[...]

    def _check(self, keys: mx.array, values: mx.array) -> None:
        op = "[FollowingRows.update_and_fetch]"
        for name, array in (("keys", keys), ("values", values)):
            if array.ndim != 4 or 0 in array.shape[:3]:
                raise ValueError(f"{op} {name} have shape {array.shape}, expected [B, H, L, D].")
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(f"{op} keys and values have shapes {keys.shape} and {values.shape}.")
        stored_rows = zip(("keys", "values"), (keys, values), self._companions(), strict=False)
        for name, new, stored in stored_rows:
            if Layout.of(new) != Layout.of(stored):
                raise ValueError(f"{op} {name} are {Layout.of(new)}, expected {Layout.of(stored)}.")
        leading = self.leader.positions
        if leading is not None and leading.shape[:2] != keys.shape[:2]:
            raise ValueError(
                f"{op} keys have shape {keys.shape}, expected B, H = {leading.shape[:2]} as the "
                "leader."
            )

    def _companions(self) -> tuple[mx.array, ...]:
        store = self.leader._store
        return () if store is None else store.companions

    @property
    def keys(self) -> mx.array | None:
        """The stored keys [B, H, N, D], or None. May be set to an array of the same shape."""
        found = self._companions()
        return found[0][...] if found else None

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._set("keys", 0, keys)

    @property
    def values(self) -> mx.array | None:
        """The stored values [B, H, N, Dv], or None. May be set to an array of the same shape."""
        found = self._companions()
        return found[1][...] if found else None

    @values.setter
    def values(self, values: mx.array) -> None:
        self._set("values", 1, values)

    def _set(self, name: str, place: int, found: mx.array) -> None:
        store, companions = self.leader._store, [*self._companions()]
        stored = companions[place] if companions else None
        if (
            store is None
            or stored is None
            or found.shape != stored.shape
            or found.dtype != stored.dtype
        ):
            expected = (
                "none, before any update" if stored is None else f"{stored.dtype} {stored.shape}"
            )
            raise ValueError(
                f"[FollowingRows.{name}] found {found.dtype} {found.shape}, expected {expected}."
            )
        companions[place] = found
        store.companions = tuple(companions)

    @property
    def positions(self) -> mx.array | None:
        """int32 [B, H, N]: the place of each stored row in the sequence."""
        return self.leader.positions

    @property
    def state(self) -> tuple[Any, ...]:
        """keys, values, positions and offset, to be read after the leader's, in its order."""
        found, slots = self._companions(), self.leader.saved_order()
        positions = self.leader.positions
        if not found or positions is None:
            return None, None, None, self.offset
        arrays = [*found, positions]
        if slots is not None:
            arrays = [taken(array, slots) for array in arrays]
        return *arrays, self.offset

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        keys, values, _, _ = state
        if keys is not None and self.leader._store is not None:
            self.leader._store.companions = keys, values

    @property
    def nbytes(self) -> int:
        """Bytes stored: keys and values."""
        return sum(array.nbytes for array in self._companions())
