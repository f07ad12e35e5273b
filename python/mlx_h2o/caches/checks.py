"""Checks of what a cache is given. All raise errors that name what was found and expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .table import Table


def check_rows(
    owner: str, keys: mx.array, values: mx.array, stored: Sequence[tuple[Any, ...]]
) -> None:
    """New rows [B, H, L, D] and [B, H, L, Dv] that fit each other and the layouts ``stored``."""
    op = f"[{owner}.update_and_fetch]"
    shape, other = keys.shape, values.shape
    if len(shape) != 4 or len(other) != 4 or shape[:3] != other[:3]:
        raise ValueError(
            f"{op} keys have shape {keys.shape}, values {values.shape}, expected [B, H, L, D] "
            "and [B, H, L, Dv]."
        )
    if 0 in shape[:3]:
        raise ValueError(f"{op} keys have shape {keys.shape}, expected B, H, L of at least 1.")
    for name, new, expected in zip(("keys", "values"), (keys, values), stored, strict=False):
        found = (*new.shape[:2], new.shape[3], new.dtype)
        if found != expected:
            raise ValueError(
                f"{op} {name} are {_described(found)}, expected {_described(expected)} as the "
                "stored rows."
            )


def _described(layout: tuple[Any, ...]) -> str:
    batch, heads, width, dtype = layout
    return f"{dtype} with B = {batch}, H = {heads}, row size {width}"


def check_seen(operation: str, array: mx.array, axis: int, table: Table | None) -> Table:
    """Keys [B, H, N, D], or their words, or scores [B, Hq, L, N] of the rows that were handed out,
    N in ``axis``, with a multiple of their heads: latent attention (MLA) may spread the one that is
    stored. Returns the table."""
    op = f"[H2OKVCache.{operation}]"
    if table is None:
        raise ValueError(f"{op} there are no rows to score, expected an update first.")
    (batch, heads), width, found = table.shape, table.shown, array.shape
    fits = len(found) == 4 and (found[0], found[axis]) == (batch, width) and 0 not in found
    if not fits or found[1] % heads or (axis == 3 and array.dtype != mx.float32):
        said = ("keys", "[B, H, N, D]") if axis == 2 else ("scores", f"{mx.float32} [B, H, L, N]")
        raise ValueError(
            f"{op} {said[0]} are {array.dtype} {found}, expected {said[1]} with B = {batch}, H a "
            f"multiple of {heads}, N = {width} as the stored rows."
        )
    return table
