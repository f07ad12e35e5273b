"""The caches that the demo compares, all but the first with the same budget."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_h2o.cache import H2OKVCache
from mlx_h2o.config import H2OConfig

__all__ = ["Arm", "arms"]


@dataclass(frozen=True)
class Arm:
    """A name, and a function that makes a new list of caches, one per layer."""

    name: str
    make_cache: Callable[[], list[Any]]


def arms(layers: int, max_kv_size: int) -> list[Arm]:
    """The full cache, first, as the others are compared with it, and three bounded ones."""
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    rotating: Callable[..., Any] = RotatingKVCache

    def each(make: Callable[[], Any]) -> Callable[[], list[Any]]:
        return lambda: [make() for _ in range(layers)]

    def h2o(policy: str) -> Callable[[], list[Any]]:
        config = H2OConfig(max_kv_size=max_kv_size, policy=policy)
        return each(lambda: H2OKVCache(config))

    return [
        Arm("full cache", each(KVCache)),
        # keep=4 is what mlx_lm itself uses for --max-kv-size.
        Arm("rotating", each(lambda: rotating(max_size=max_kv_size, keep=4))),
        Arm("H2O h2o", h2o("h2o")),
        Arm("H2O keydiff", h2o("keydiff")),
    ]
