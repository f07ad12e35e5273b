"""Evicting caches for the models of mlx-vlm, which its prompt cache can store.

mlx-vlm's language models call an attention function with the name and arguments of mlx_lm's, so
that every policy and row format works. Batches do not: mlx-vlm makes them of its own caches only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mlx_lm.models import cache as mlx_lm_cache
from mlx_vlm.apc_adapters import Capability, register_capability
from mlx_vlm.models import cache as mlx_vlm_cache

from .caches.cache import H2OKVCache, QuantizedH2OKVCache
from .caches.heads import HeadGroups
from .lm.generate import made_by
from .lm.prompt_cache import make_prompt_cache

__all__ = ["evicting"]


def _restore(cache: Any, found: dict[str, Any]) -> None:
    cache.state = found["state"]


for _cls in (H2OKVCache, QuantizedH2OKVCache, HeadGroups):
    register_capability(_cls, Capability.CHECKPOINT)
    setattr(_cls, "prefix_cache_snapshot", lambda cache: {"state": cache.state})  # noqa: B010
    setattr(_cls, "prefix_cache_restore", _restore)  # noqa: B010


@contextlib.contextmanager
def evicting(model: Any, **settings: Any) -> Iterator[None]:
    """Within the context, the caches that mlx-vlm makes for this model evict.

    mlx-vlm's ``generate`` and ``stream_generate`` are called as before. ``apc_manager`` works too:
    a prompt that shares a prefix with an earlier one continues from the caches kept for it.

    Args:
        model: from ``mlx_vlm.load``, or another with a ``language_model``.
        settings: as in :func:`mlx_h2o.make_prompt_cache`; every KV head has the same rows.

    Raises:
        ValueError: settings out of range, or a model that keeps no plain KVCache.
    """
    language = model.language_model
    stock = [
        mlx_lm_cache.KVCache() if type(one) is mlx_vlm_cache.KVCache else one
        for one in mlx_vlm_cache.make_prompt_cache(language)
    ]
    with made_by(language, stock):
        fresh = make_prompt_cache(language, **{"layers": "equal"} | settings)
    with made_by(language, fresh):
        yield
