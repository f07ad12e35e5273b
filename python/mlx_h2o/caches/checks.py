"""Checks of what a cache is given. All raise errors that name what was found and expected."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .table import Table

__all__ = ["check_attended", "check_rows", "check_scores"]


def check_rows(keys: mx.array, values: mx.array, table: Table | None) -> None:
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
    if table is None:
        return
    for name, new, column in (
        ("keys", keys, table.tail.keys),
        ("values", values, table.tail.values),
    ):
        found = (*new.shape[:2], new.shape[3], new.dtype)
        if found != column.layout:
            raise ValueError(
                f"{op} {name} are {_described(found)}, expected {_described(column.layout)} as the "
                "stored rows."
            )


def _described(layout: tuple[Any, ...]) -> str:
    batch, heads, width, dtype = layout
    return f"{dtype} with B = {batch}, H = {heads}, row size {width}"


def check_scores(scores: mx.array, table: Table | None, width: int) -> None:
    """Scores float32 [B, Hq, L, N] of the rows that the last update handed out."""
    op = "[H2OKVCache.update_scores]"
    if table is None:
        raise ValueError(f"{op} there are no rows to score, expected an update first.")
    batch, heads = table.shape
    found = scores.shape
    fits = len(found) == 4 and (found[0], found[3]) == (batch, width) and 0 not in found
    if scores.dtype != mx.float32 or not fits or found[1] % heads:
        raise ValueError(
            f"{op} scores are {scores.dtype} {found}, expected mlx.core.float32 [B, Hq, L, N] "
            f"with B = {batch}, Hq a multiple of {heads}, N = {width}."
        )


def check_attended(keys: Any, table: Table | None, width: int) -> None:
    """Keys [B, Hk, N, D], or packed ones, of as many rows as were handed out, with a multiple of
    their heads.

    Latent attention (MLA) may spread the one stored head over several before it attends.
    """
    op = "[H2OKVCache.attend]"
    if table is None:
        raise ValueError(f"{op} there are no rows to score, expected an update first.")
    batch, heads = table.shape
    found = (keys[0] if isinstance(keys, tuple) else keys).shape
    if len(found) != 4 or (found[0], found[2]) != (batch, width) or found[1] % heads:
        raise ValueError(
            f"{op} keys have shape {found}, expected [B, H, N, D] with B = {batch}, "
            f"H a multiple of {heads}, N = {width} as the stored rows."
        )
