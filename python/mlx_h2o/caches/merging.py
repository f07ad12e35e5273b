"""Which caches may become one batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..config import H2OConfig
from .cache import H2OKVCache

__all__ = ["check_mergeable", "differing"]


def check_mergeable(caches: Sequence[Any]) -> None:
    """Raises ValueError as ``BatchH2OKVCache.merge`` says."""
    op = "[BatchH2OKVCache.merge]"
    if not caches:
        raise ValueError(f"{op} found no caches, expected at least one.")
    for cache in caches:
        if not isinstance(cache, H2OKVCache):
            raise ValueError(f"{op} found a {type(cache).__name__}, expected H2OKVCache only.")
        if cache.config.speculative:
            raise ValueError(
                f"{op} speculative is {cache.config.speculative}, expected 0: there is no "
                "speculative decoding of batches."
            )
        held = 1 if cache.positions is None else cache.positions.shape[0]
        if held != 1:
            raise ValueError(f"{op} found a cache of {held} sequences, expected one.")
    if any(cache.unequal_budgets for cache in caches):
        raise ValueError(
            f"{op} found layers with unequal budgets, expected one budget: a batch has one "
            "mask for all layers."
        )
    if any(cache.config != caches[0].config for cache in caches):
        raise ValueError(f"{op} {differing(cache.config for cache in caches)}")


def differing(configs: Iterable[H2OConfig]) -> str:
    """What is wrong with settings that are not the same."""
    first, *others = dict.fromkeys(configs)
    return (
        f"found the settings {others[0]} beside {first}, expected the same: a batch has one budget "
        "and one policy."
    )
