"""Checks of arguments to a cache. The errors name what was found and what was expected."""

from collections.abc import Sequence
from contextlib import suppress
from operator import index
from typing import Any

import mlx.core as mx

from ..config import H2OConfig
from ..errors import LARGEST, check
from .table import Table

_ROUTED = "call the model within mlx_h2o.routing(model)"


def whole_numbers(given: Any, most: int = LARGEST, count: int | None = None) -> list[int] | None:
    """The numbers of a list or an array; None unless all are whole, from 0 to ``most``, and there
    are ``count`` (None: any number)."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    with suppress(TypeError):
        found = [index(one) for one in listed]
        right = bool not in map(type, listed) and all(0 <= one <= most for one in found)
        if right and count in (None, len(found)):
            return found
    return None


def check_rows(cache: Any, keys: mx.array, values: mx.array) -> None:
    """Check that new rows [B, H, L, D] and [B, H, L, Dv] fit each other and those of the cache."""
    op = f"[{type(cache).__name__}.update_and_fetch]"
    shape, other = keys.shape, values.shape
    if len(shape) != 4 or len(other) != 4 or shape[:3] != other[:3]:
        raise ValueError(
            f"{op} keys have shape {keys.shape}, values {values.shape}, expected [B, H, L, D] "
            "and [B, H, L, Dv]."
        )
    if 0 in shape[:3]:
        raise ValueError(f"{op} keys have shape {keys.shape}, expected B, H, L of at least 1.")
    count = len(cache._padding)
    if cache._in_batch and shape[0] != count:
        raise ValueError(f"{op} keys have shape {shape}, expected B = {count} sequences.")
    sides = zip(("keys", "values"), (keys, values), cache._table.layouts, strict=False)
    for name, new, expected in sides:
        found = (*new.shape[:2], new.shape[3], new.dtype)
        if found != expected:
            raise ValueError(
                f"{op} {name} are {_described(found)}, expected {_described(expected)} as the "
                "stored rows."
            )


def _described(layout: tuple[Any, ...]) -> str:
    batch, heads, width, dtype = layout
    return f"{dtype} with B = {batch}, H = {heads}, row size {width}"


def check_seen(operation: str, array: mx.array, axis: int, table: Table) -> bool:
    """Check keys [B, H, N, D], or their words, or scores [B, Hq, L, N] against the rows handed out;
    ``axis`` is that of N. Their heads may be a multiple of the stored ones, since latent attention
    (MLA) may spread its single head. Returns whether the numbers of heads are equal."""
    op = f"[H2OKVCache.{operation}]"
    if not table.segments:
        raise ValueError(f"{op} there are no rows to score, expected an update first.")
    (batch, heads), width, found = table.shape, table.shown, array.shape
    fits = len(found) == 4 and (found[0], found[axis]) == (batch, width) and 0 not in found
    if not fits or found[1] % heads or (axis == 3 and array.dtype != mx.float32):
        said = ("keys", "[B, H, N, D]") if axis == 2 else ("scores", f"{mx.float32} [B, H, L, N]")
        raise ValueError(
            f"{op} {said[0]} are {array.dtype} {found}, expected {said[1]} with B = {batch}, H a "
            f"multiple of {heads}, N = {width} as the stored rows."
        )
    return bool(found[1] == heads)


def check_scored(cache: Any) -> None:
    """Raise if the last update lacks its attention, instead of silently evicting without it."""
    table, policy = cache._table, cache.policy
    if not table.unscored:
        return
    wanted, them = ("scores", "them") if policy.needs_scores else ("attention of mlx_h2o's", "it")
    found = f"[H2OKVCache] {cache._described()} got no {wanted} for its last update, and"
    why, other = f"shares its first {table.prefix_rows} rows, which need it", ""
    if policy.needs_attention:
        why, other = f"the policy {policy.name!r} needs {them}", ", or choose one that needs none"
    again = "if a step was interrupted, make new caches"
    raise RuntimeError(f"{found} {why}: {_ROUTED}{other}; {again}.")


def check_stock_attention(cache: Any, packed: bool, own_mask: bool) -> None:
    """Raise if mlx_lm's own attention would get what only ours can read: shared rows, some kinds of
    ``packed`` rows, or a separate mask for each layer."""
    config, budget, frame = cache.config, "set one budget for all layers, or ", "kv_frame=False"
    refused = (
        (cache.prefix_rows, f"shares its first {cache.prefix_rows} rows", ""),
        (own_mask, "is of layers with unequal budgets, which need a mask each", budget),
        (packed and config.kv_format, f"has kv_format {config.kv_format!r}", ""),
        (packed and config.framed, "keeps its rows in a frame (kv_frame)", f"set {frame}, or "),
    )
    for found, said, instead in refused:
        if found:
            raise ValueError(
                f"[{type(cache).__name__}] {cache._described()} {said}, of which mlx_lm's own "
                f"attention does not know: {instead}{_ROUTED}."
            )


def check_mergeable(caches: Sequence[Any], kind: type[Any]) -> None:
    """Check that the caches are of this ``kind``, hold one sequence each and can form a batch."""
    op = "[BatchH2OKVCache.merge]"
    if not caches:
        raise ValueError(f"{op} found no caches, expected at least one.")
    for cache in caches:
        if not isinstance(cache, kind):
            raise ValueError(f"{op} found a {type(cache).__name__}, expected H2OKVCache only.")
        drafts, wanted = cache.config.speculative, "0: there is no speculative decoding of batches"
        check(not drafts, "speculative", drafts, wanted, operation="BatchH2OKVCache.merge")
        held = cache._table.shape[0] if cache._table.segments else len(cache._padding)
        if held != 1:
            raise ValueError(f"{op} found a cache of {held} sequences, expected one.")
        if cache.unequal_budgets and cache.config.kv_handed == "fused":
            raise ValueError(
                f"{op} {cache._described()} is of a model whose own attention takes one mask for "
                "all layers, and found unequal budgets: expected one budget for all layers, or one "
                "sequence at a time."
            )
    check_alike(op, caches)


def check_alike(op: str, caches: Sequence[Any]) -> None:
    """Check that settings are equal, except ``preallocate``, which files do not store."""
    found = dict.fromkeys(cache.config for cache in caches)
    if len(found) > 1:
        found = dict.fromkeys(H2OConfig.of(**one.named() | {"preallocate": False}) for one in found)
    first, *others = found
    if others:
        raise ValueError(
            f"{op} found the settings {others[0]} beside {first}, expected the same: a batch has "
            "one budget and one policy."
        )
