"""The cache classes of this package by name: mlx_lm's files hold names, looked up in its module."""

from __future__ import annotations

from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

from ..caches.batch import BatchH2OKVCache
from ..caches.cache import H2OKVCache
from ..caches.heads import HeadGroups
from ..caches.quantized import QuantizedH2OKVCache
from .replacements import Target, always


def cache_classes() -> dict[str, type[Any]]:
    """Every class that a saved prompt cache of ours may name."""
    classes = (H2OKVCache, QuantizedH2OKVCache, BatchH2OKVCache, HeadGroups)
    found: dict[str, type[Any]] = {cls.__name__: cls for cls in classes}
    # Names in files of earlier versions.
    return found | {
        "SpeculativeH2OKVCache": H2OKVCache,
        "SpeculativeQuantizedH2OKVCache": QuantizedH2OKVCache,
    }


def class_name_targets() -> list[Target]:
    """What makes mlx_lm's own ``load_prompt_cache`` and cache lists find our classes."""
    return [
        Target(vars(mlx_lm_cache), name, always(cls), must_exist=False)
        for name, cls in cache_classes().items()
    ]
