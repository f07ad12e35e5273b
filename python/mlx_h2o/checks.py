"""Checks of what a cache is given. All raise ValueError that names what was found and expected."""

from __future__ import annotations

import mlx.core as mx

from .store import RowStore

__all__ = ["check_attended", "check_replacement", "check_rows", "check_scores"]


def check_rows(keys: mx.array, values: mx.array, store: RowStore | None) -> None:
    """New rows [B, H, L, D] and [B, H, L, Dv] that fit each other and the stored ones."""
    op = "[H2OKVCache.update_and_fetch]"
    shape, other = keys.shape, values.shape
    if len(shape) != 4 or len(other) != 4 or shape[:3] != other[:3]:
        raise ValueError(
            f"{op} keys have shape {keys.shape}, values {values.shape}, expected [B, H, L, D] "
            "and [B, H, L, Dv]."
        )
    if 0 in shape[:3]:
        raise ValueError(f"{op} keys have shape {keys.shape}, expected B, H, L of at least 1.")
    if store is not None and not (_fits(keys, store.keys) and _fits(values, store.values)):
        for name, new, stored in (("keys", keys, store.keys), ("values", values, store.values)):
            found, expected = _layout(new), _layout(stored)
            if found != expected:
                raise ValueError(
                    f"{op} {name} are {found}, expected {expected} as the stored rows."
                )


def _fits(new: mx.array, stored: mx.array) -> bool:
    """Whether the layouts are equal; the texts are only made where they differ."""
    a, b = new.shape, stored.shape
    return a[:2] == b[:2] and a[3] == b[3] and new.dtype == stored.dtype


def check_scores(scores: mx.array, store: RowStore | None) -> None:
    """Scores float32 [B, Hq, L, N] of the stored rows."""
    op = "[H2OKVCache.update_scores]"
    if store is None:
        raise ValueError(f"{op} there are no rows to score, expected an update first.")
    batch, heads, rows = store.positions.shape
    found = scores.shape
    fits = len(found) == 4 and (found[0], found[3]) == (batch, rows) and 0 not in found
    if scores.dtype != mx.float32 or not fits or found[1] % heads:
        raise ValueError(
            f"{op} scores are {scores.dtype} {found}, expected mlx.core.float32 [B, Hq, L, N] "
            f"with B = {batch}, Hq a multiple of {heads}, N = {rows}."
        )


def check_attended(keys: mx.array, store: RowStore | None) -> None:
    """Keys [B, Hk, N, D] of as many rows as are stored, with a multiple of their heads.

    Latent attention (MLA) may spread the one stored head over several before it attends.
    """
    op = "[H2OKVCache.attend]"
    if store is None:
        raise ValueError(f"{op} there are no rows to score, expected an update first.")
    batch, heads, rows = store.positions.shape
    found = keys.shape
    if len(found) != 4 or (found[0], found[2]) != (batch, rows) or found[1] % heads:
        raise ValueError(
            f"{op} keys have shape {keys.shape}, expected [B, H, N, D] with B = {batch}, "
            f"H a multiple of {heads}, N = {rows} as the stored rows."
        )


def check_replacement(name: str, array: mx.array, store: RowStore | None) -> RowStore:
    """An array that takes the place of all stored keys or values; returns the store."""
    op = f"[H2OKVCache.{name}]"
    if store is None:
        raise ValueError(f"{op} an array of shape {array.shape} was set, but no rows are stored.")
    stored = store.keys if name == "keys" else store.values
    if array.ndim != 4 or array.shape[2] != store.length or _layout(array) != _layout(stored):
        raise ValueError(
            f"{op} found {array.dtype} {array.shape}, expected {store.length} rows and "
            f"{_layout(stored)}."
        )
    return store


def _layout(array: mx.array) -> str:
    batch, heads, _, width = array.shape
    return f"{array.dtype} with B = {batch}, H = {heads}, row size {width}"
