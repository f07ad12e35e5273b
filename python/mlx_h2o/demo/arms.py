"""The caches that the demo compares, all but the first with the same budget."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx_h2o

__all__ = ["Arm", "arms"]


@dataclass(frozen=True)
class Arm:
    """A name, and a function that makes a new list of caches, one per layer."""

    name: str
    make_cache: Callable[[], list[Any]]


def arms(model: Any, max_kv_size: int) -> list[Arm]:
    """The full cache, first, as the others are compared with it, and three bounded ones."""
    from mlx_lm.models.cache import make_prompt_cache as stock

    def h2o(policy: str) -> Callable[[], list[Any]]:
        return lambda: mlx_h2o.make_prompt_cache(model, max_kv_size, policy=policy)

    return [
        Arm("full cache", lambda: stock(model)),
        Arm("rotating", lambda: stock(model, max_kv_size)),  # RotatingKVCache(keep=4)
        Arm("h2o", h2o("h2o")),
        Arm("keydiff", h2o("keydiff")),
    ]
