"""Evicting KV caches (H2O) and attention that returns its scores, for MLX.

The operations are in :mod:`mlx_h2o.fast`; the cache is :class:`H2OKVCache`; ``load``,
``generate``, ``stream_generate``, ``make_prompt_cache`` and ``routing`` work with mlx_lm, which is
imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mlx_h2o.version import __version__, check_versions

try:
    import mlx.core as _mx  # noqa: F401  (only to fail early, with advice)
except ImportError as error:
    raise ImportError(
        "mlx_h2o needs MLX with a back end for this machine. On Linux install one of the extras: "
        "pip install 'mlx-h2o[cpu]' or pip install 'mlx-h2o[cuda13]'; on macOS: pip install mlx. "
        f"(import mlx.core failed: {error})"
    ) from error
else:
    check_versions()

from mlx_h2o import fast
from mlx_h2o.operations.backends import BackendStatus, backends, use_backend
from mlx_h2o.operations.native.module import set_threads, threads

if TYPE_CHECKING:
    from mlx_h2o.caches.cache import BatchH2OKVCache, H2OKVCache, QuantizedH2OKVCache
    from mlx_h2o.caches.heads import HeadGroups
    from mlx_h2o.config import Affine, Budget, Codes, Dense, H2OConfig, Mixed, SettingError
    from mlx_h2o.lm.generate import batch_generate, evicting, generate, load, stream_generate
    from mlx_h2o.lm.prompt_cache import fit_bytes, make_prompt_cache
    from mlx_h2o.lm.routing import routing
    from mlx_h2o.lm.saving import load_prompt_cache, save_prompt_cache

__all__ = [
    "Affine", "BackendStatus", "BatchH2OKVCache", "Budget", "Codes", "Dense", "H2OConfig",
    "H2OKVCache", "HeadGroups", "Mixed", "QuantizedH2OKVCache", "SettingError", "__version__",
    "backends", "batch_generate", "evicting", "fast", "fit_bytes", "generate", "load",
    "load_prompt_cache", "make_prompt_cache", "routing", "save_prompt_cache", "set_threads",
    "stream_generate", "threads", "use_backend",
]  # fmt: skip

_LAZY = (
    "mlx_h2o.config", "mlx_h2o.caches.cache", "mlx_h2o.caches.heads", "mlx_h2o.lm.routing",
    "mlx_h2o.lm.prompt_cache", "mlx_h2o.lm.saving", "mlx_h2o.lm.generate",
)  # fmt: skip
"""Modules with names that are imported when they are first used; those that import little first."""


def __getattr__(name: str) -> Any:
    for module in _LAZY if name in __all__ else ():
        if (found := getattr(importlib.import_module(module), name, None)) is not None:
            return globals().setdefault(name, found)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
