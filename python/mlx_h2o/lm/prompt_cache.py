"""The caches of a model: evicting ones in the places of mlx_lm's unbounded ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from mlx.nn.layers.base import Module
from mlx_lm.models import cache as mlx_lm_cache

from ..caches.cache import H2OKVCache
from ..caches.linked import LinkedH2OCache
from ..caches.quantized import evicting_cache
from ..config import H2OConfig
from .budgets import Budgets, layer_configs
from .routing import calls_attention, model_classes, model_name

# Modules of mlx_lm.models whose attention cannot be served, and why.
_REFUSED = {
    "afm7": "its shared layers take the position from the number of stored rows",
    "phi3small": "its block-sparse attention selects rows by their slot",
    "minimax_m3_vl": "its attention selects blocks of rows by their slot",
}

# Modules that compute with the keys between the cache and attention, which packed rows forbid.
_WANT_ARRAYS = {"phi", "phixtral", "plamo", "stablelm"}

# Modules whose cache lists are attention's rows and its indexer's, which picks rows by their slots.
_INDEXED = {"deepseek_v32"}


def make_prompt_cache(
    model: Module,
    max_kv_size: int | H2OConfig | None = None,
    *,
    budgets: Budgets | None = None,
    **settings: Any,
) -> list[Any]:
    """One cache per layer, as mlx_lm's function of this name makes, but bounded by eviction.

    Exactly the plain ``KVCache`` entries become :class:`H2OKVCache`, or with ``kv_bits``
    :class:`QuantizedH2OKVCache`; rotating, chunked and recurrent caches stay what they are.

    Args:
        model: an mlx_lm model.
        max_kv_size: rows per KV head, or all the settings as an H2OConfig; None for the default.
        budgets: for layers that differ, one per layer that evicts, in order: ``max_kv_size``, or
            all the settings as an H2OConfig; or a file that ``mlx_h2o profile`` wrote.
            Unequal budgets are refused by models that make one array mask for all layers, when
            they ask for it, and by batches.
        settings: further settings of H2OConfig.

    Raises:
        ValueError: settings out of range, a model whose attention cannot be served, or one
            without any cache that could evict; other than one budget per evicting layer.
    """
    config = _config(max_kv_size, settings)
    name = model_name(model)
    _refuse_unserved(model)
    config = _handing(model, config)
    linked = bool(_modules_of(model) & _INDEXED)
    if linked:
        _check_indexed(model, config)
    caches = [
        _replaced(cache, config, f"{name} layer {layer}", linked)
        for layer, cache in enumerate(mlx_lm_cache.make_prompt_cache(model))
    ]
    if budgets is not None:
        _give(caches, layer_configs(config, budgets, len(list(evicting_caches(caches)))), linked)
    if not any(True for _ in evicting_caches(caches)):
        raise ValueError(
            f"[make_prompt_cache] {name} makes no plain KVCache, expected at least one layer "
            "whose rows could be evicted."
        )
    return caches


@dataclass(frozen=True)
class CacheSummary:
    """What the caches of a model hold; ``str()`` says it in a line.

    layers: caches, one per layer.
    evicting: H2OKVCache among them.
    rows: rows per head of the fullest evicting cache.
    evicted: rows per head that have gone, summed over the evicting caches.
    nbytes: bytes of all caches.
    """

    layers: int
    evicting: int
    rows: int
    evicted: int
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.evicting} of {self.layers} layers evict, {self.rows} rows, "
            f"{self.evicted} evicted, {self.nbytes:,} bytes"
        )


def summary(caches: Sequence[Any]) -> CacheSummary:
    """Count layers, rows and bytes of a model's caches. Evaluates nothing."""
    evicting = list(evicting_caches(caches))
    return CacheSummary(
        layers=len(caches),
        evicting=sum(any(evicting_caches([cache])) for cache in caches),
        rows=max((cache.size() for cache in evicting), default=0),
        evicted=sum(cache.evicted for cache in evicting),
        nbytes=sum(cache.nbytes for cache in caches),
    )


def evicting_caches(caches: Sequence[Any]) -> Iterator[H2OKVCache]:
    """The H2OKVCache among ``caches``, those inside of cache lists included."""
    for cache in caches:
        if isinstance(cache, H2OKVCache):
            yield cache
        elif isinstance(cache, mlx_lm_cache.CacheList | LinkedH2OCache):
            yield from evicting_caches(cache.caches)


def _config(max_kv_size: int | H2OConfig | None, settings: dict[str, Any]) -> H2OConfig:
    if isinstance(max_kv_size, H2OConfig):
        if settings:
            raise ValueError(
                f"[make_prompt_cache] found an H2OConfig and the settings {sorted(settings)}, "
                "expected one or the other."
            )
        return max_kv_size
    unknown = sorted(set(settings) - set(H2OConfig.setting_names()))
    if unknown:
        raise ValueError(
            f"[make_prompt_cache] unknown settings {unknown}, expected some of "
            f"{list(H2OConfig.setting_names())}."
        )
    if max_kv_size is not None:
        settings = {**settings, "max_kv_size": max_kv_size}
    return H2OConfig(**settings)


def _replaced(cache: Any, config: H2OConfig, name: str, linked: bool) -> Any:
    if type(cache) is mlx_lm_cache.KVCache:
        return evicting_cache(config, name=name)
    if type(cache) is mlx_lm_cache.CacheList and linked:
        return LinkedH2OCache(config, name=name)
    if type(cache) is mlx_lm_cache.CacheList:
        parts = [_replaced(part, config, name, linked) for part in cache.caches]
        return cast(Any, mlx_lm_cache.CacheList)(*parts)
    return cache


def _give(caches: list[Any], configs: list[H2OConfig], linked: bool) -> None:
    """Each evicting cache its own settings."""
    unequal = len({config.max_kv_size for config in configs}) > 1
    if unequal and linked:
        raise ValueError(
            "[make_prompt_cache] budgets are unequal, expected one for all: the rows of attention "
            "and indexer are linked."
        )
    for cache, config in zip(evicting_caches(caches), configs, strict=True):
        if config.kv_bits != cache.config.kv_bits:
            raise ValueError(
                f"[make_prompt_cache] a budget has kv_bits {config.kv_bits}, expected "
                f"{cache.config.kv_bits} as the other settings."
            )
        cache.take_settings(config, unequal_budgets=unequal)


def _modules_of(model: Module) -> set[str]:
    """The files of mlx_lm.models whose classes a model is made of."""
    names = (cls.__module__.rpartition(".") for cls in model_classes(model))
    return {module for package, _, module in names if package == "mlx_lm.models"}


def _refuse_unserved(model: Module) -> None:
    for module in sorted(_modules_of(model) & _REFUSED.keys()):
        raise ValueError(
            f"[make_prompt_cache] {model_name(model)} cannot be served: {_REFUSED[module]}. "
            "Expected another model, or mlx_lm's own caches."
        )


def _handing(model: Module, config: H2OConfig) -> H2OConfig:
    """The settings, with the form in which this model takes quantised rows."""
    if config.kv_bits is None or config.kv_handed != "packed":
        return config
    modules = _modules_of(model)
    if "mla" in modules:
        return replace(config, kv_handed="latents")
    wants = bool(modules & _WANT_ARRAYS) or not calls_attention(model)
    return replace(config, kv_handed="arrays") if wants else config


def _check_indexed(model: Any, config: H2OConfig) -> None:
    """While all rows fit under what the indexer picks, it leaves them all to attention."""
    rows = config.max_kv_size
    if rows is None or rows > model.args.index_topk:
        raise ValueError(
            f"[make_prompt_cache] {model_name(model)} picks {model.args.index_topk} rows by an "
            f"indexer: found max_kv_size = {rows}, expected at most that many."
        )
