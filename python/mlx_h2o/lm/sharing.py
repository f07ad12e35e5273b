"""The first tokens of several prompts: read once, and held once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.utils import common_prefix_len

from ..caches.cache import H2OKVCache
from ..caches.formats import unshareable
from ..caches.heads import HeadGroups
from .models import computes_with_keys
from .prompt_cache import evicting_caches
from .routing import calls_attention, model_name

LEAST_SHARED = 32
"""Tokens: for fewer it does not pay to read the rows of a sequence in two parts."""


def shareable(
    model: Module, caches: Sequence[Any], prompts: Sequence[Sequence[int]]
) -> tuple[int, str]:
    """How many first tokens the prompts can share in caches of one sequence; 0, and why, where they
    cannot."""
    if reason := _unshared_because(model, caches):
        return 0, reason
    common = common_tokens(prompts)
    bounded = [one.config for one in evicting_caches(caches) if one.config.max_kv_size is not None]
    lasting = min((one.prefix_size for one in bounded), default=sys.maxsize)
    if (found := min(common, lasting)) >= LEAST_SHARED:
        return found, ""
    kept = f"the first {lasting}" if bounded else "all"
    return 0, (
        f"the prompts begin with the same {common} tokens, of which {kept} are never evicted "
        f"(prefix_size): less than {LEAST_SHARED}"
    )


def common_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens are the same in all prompts; one at least of each is another."""
    first, last = min(map(list, prompts)), max(map(list, prompts))  # which differ soonest of all
    common: Any = common_prefix_len
    return max(0, min(int(common(first, last)), min(map(len, prompts)) - 1))


def _unshared_because(model: Module, caches: Sequence[Any]) -> str:
    if not calls_attention(model) or computes_with_keys(model):
        return f"{model_name(model)} does not hand the keys of its cache to mlx_lm's attention"
    for layer, one in enumerate(caches):
        nested = any(evicting_caches([one])) and not isinstance(one, H2OKVCache | HeadGroups)
        if nested or not hasattr(one, "merge"):
            return f"layer {layer} has a {type(one).__name__}, which shares no rows"
        for own in evicting_caches([one]):
            if reason := unshareable(own.config):
                return f"layer {layer} has {reason}"
    return ""


def share(caches: Sequence[Any]) -> None:
    """Have copies of the caches of one sequence share all rows that are there."""
    for one in evicting_caches(caches):
        one.share(one.offset)
    mx.eval([cache.state for cache in caches])
    mx.clear_cache()
