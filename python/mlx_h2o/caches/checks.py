"""Checks of what a cache is given. All raise ValueError that names what was found and expected."""

from __future__ import annotations

import mlx.core as mx

from ..stores.storage import Layout, Storage, Stored

__all__ = ["check_attended", "check_rows", "check_scored", "check_scores"]


def check_rows(keys: mx.array, values: mx.array, store: Storage | None) -> None:
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
    if store is None:
        return
    for name, new, stored in (
        ("keys", keys, store.key_layout),
        ("values", values, store.value_layout),
    ):
        found = Layout.of(new)
        if found != stored:
            raise ValueError(f"{op} {name} are {found}, expected {stored} as the stored rows.")


def check_scored(unscored: bool, described: str, policy: str) -> None:
    """RuntimeError where the last update still waits for its scores: eviction is never off."""
    if unscored:
        raise RuntimeError(
            f"[H2OKVCache] {described} got no scores for its last update, and the policy "
            f"{policy!r} needs them: call the model within mlx_h2o.routing(model), or choose a "
            "policy that needs none."
        )


def check_scores(scores: mx.array, store: Storage | None) -> None:
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


def check_attended(keys: Stored, store: Storage | None) -> None:
    """Keys [B, Hk, N, D], or packed ones, of as many rows as are stored, with a multiple of
    their heads.

    Latent attention (MLA) may spread the one stored head over several before it attends.
    """
    op = "[H2OKVCache.attend]"
    if store is None:
        raise ValueError(f"{op} there are no rows to score, expected an update first.")
    batch, heads, rows = store.positions.shape
    found = (keys[0] if isinstance(keys, tuple) else keys).shape
    if len(found) != 4 or (found[0], found[2]) != (batch, rows) or found[1] % heads:
        raise ValueError(
            f"{op} keys have shape {found}, expected [B, H, N, D] with B = {batch}, "
            f"H a multiple of {heads}, N = {rows} as the stored rows."
        )
