"""A common prefix of several prompts, prefilled once and held once."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..caches.cache import H2OKVCache
from ..caches.formats import unshareable
from ..caches.heads import HeadGroups
from .models import computes_with_keys
from .routing import calls_attention, evicting_caches

LEAST_SHARED = 32
"""Fewest tokens to share: below, reading the rows of a sequence in two parts does not pay."""


def shareable(model: Module, caches: Sequence[Any], prompts: Sequence[Sequence[int]]) -> int:
    """How many leading tokens the prompts can share: the common ones that no cache ever evicts. 0
    if they are few, if the model does not pass the keys of its caches to mlx_lm's attention, or if
    a layer's cache cannot share rows."""
    if not calls_attention(model) or computes_with_keys(model) or not all(map(_shares, caches)):
        return 0
    bounded = (one.config for one in evicting_caches(caches) if one.config.max_kv_size is not None)
    same = (min(common(prompts[0], one), len(one) - 1) for one in prompts)  # leave one to read
    found = min([*same, *(one.prefix_size for one in bounded)])
    return found if found >= LEAST_SHARED else 0


def common(one: Any, other: Any) -> int:
    """The length of the common prefix of two sequences."""
    size = min(len(one), len(other))
    differs = np.asarray(one)[:size] != np.asarray(other)[:size]
    return int(differs.argmax()) if differs.any() else size


def _shares(cache: Any) -> bool:
    ours = list(evicting_caches([cache]))
    whole = isinstance(cache, H2OKVCache | HeadGroups) or (not ours and hasattr(cache, "merge"))
    return whole and not any(unshareable(one.config) for one in ours)


def share(caches: Sequence[Any]) -> None:
    """Let copies of these caches of one sequence share all rows that they hold."""
    for one in evicting_caches(caches):
        one.share(one.offset)
    mx.eval([cache.state for cache in caches])
    mx.clear_cache()
