"""The first tokens of several prompts: read once, and held once."""

from __future__ import annotations

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
"""Tokens: for fewer it does not pay to read the rows of a sequence in two parts."""


def shareable(model: Module, caches: Sequence[Any], prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens the prompts can share in caches of one sequence: those that no cache
    ever evicts, or 0 where they are few, the model does not hand the keys of its cache to mlx_lm's
    attention, or a layer's cache shares no rows."""
    if not calls_attention(model) or computes_with_keys(model) or not all(map(_shares, caches)):
        return 0
    bounded = (one.config for one in evicting_caches(caches) if one.config.max_kv_size is not None)
    same = (min(common(prompts[0], one), len(one) - 1) for one in prompts)  # one is to be read
    found = min([*same, *(one.prefix_size for one in bounded)])
    return found if found >= LEAST_SHARED else 0


def common(one: Any, other: Any) -> int:
    """How many first tokens of two sequences are the same."""
    size = min(len(one), len(other))
    differs = np.asarray(one)[:size] != np.asarray(other)[:size]
    return int(differs.argmax()) if differs.any() else size


def _shares(cache: Any) -> bool:
    ours = list(evicting_caches([cache]))
    whole = isinstance(cache, H2OKVCache | HeadGroups) or (not ours and hasattr(cache, "merge"))
    return whole and not any(unshareable(one.config) for one in ours)


def share(caches: Sequence[Any]) -> None:
    """Have copies of the caches of one sequence share all rows that are there."""
    for one in evicting_caches(caches):
        one.share(one.offset)
    mx.eval([cache.state for cache in caches])
    mx.clear_cache()
