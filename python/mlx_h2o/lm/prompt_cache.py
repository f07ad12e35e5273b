"""The caches of a model: evicting ones in the places of mlx_lm's unbounded ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import cache as mlx_lm_cache

from ..caches.cache import PROMPT_CHUNK, H2OKVCache
from ..caches.linked import LinkedH2OCache
from ..caches.quantized import evicting_cache
from ..config import H2OConfig
from ..policies.merge import Merge
from .budgets import Budgets, layer_configs
from .layers import LAYERS, reason_of, rows_by_layer
from .routing import calls_attention, context_length, model_classes, model_name, routing_for
from .sizing import (
    MORE_BITS,
    MOST_OF_IT,
    PACKED_BITS,
    Measure,
    Sizing,
    least_rows,
    measured,
    most_rows,
    parsed_bytes,
)

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
    draft_model: Module | None = None,
    budgets: Budgets | None = None,
    max_kv_bytes: int | str | None = None,
    layers: str = "probe",
    **settings: Any,
) -> list[Any]:
    """One cache per layer, like mlx_lm's function of this name, but bounded by eviction.

    Only plain ``KVCache`` entries become :class:`H2OKVCache`, or with ``kv_bits``
    :class:`QuantizedH2OKVCache`; rotating, chunked and recurrent caches are left alone. With
    ``kv_format`` the first and the last ``turbo_guard`` of them have 8 bits instead.

    Layers that retrieve get more rows than the others, and all together no more than
    ``max_kv_size`` each would be. Which they are is computed when the first caches of a model are
    made (:func:`mlx_h2o.lm.layers.probe`).

    Rows further back than the context that the model's settings name go first, unless
    ``context_size`` says otherwise.

    Args:
        model: an mlx_lm model.
        max_kv_size: mean rows per KV head, or all the settings as an H2OConfig; None for the
            default.
        draft_model: a draft model, whose caches follow those of the model. They have the same
            settings, except ``budgets``, which belong to the model's layers.
        budgets: different settings for each evicting layer, in order: ``max_kv_size``, or all the
            settings as an H2OConfig; or a JSON file with that list under "budgets".
        max_kv_bytes: instead of ``max_kv_size``, the bytes of all full caches together, including
            those of a draft model, as a number or a text such as "300MB"; :func:`fit_bytes` shows
            the rows, bits and policy that result.
        layers: "probe", or "equal": the same rows in every layer. With ``budgets``, and where rows
            are not bounded, there is nothing to probe for.
        settings: further settings of H2OConfig.

    Raises:
        ValueError: settings out of range; a model whose attention is not supported, or without a
            cache that could evict; a number of budgets other than that of evicting layers.
    """
    if layers not in LAYERS:
        raise ValueError(
            f"[make_prompt_cache] layers is {layers!r}, expected one of: {', '.join(LAYERS)}."
        )
    if max_kv_bytes is not None:
        if max_kv_size is not None or budgets is not None:
            raise ValueError(
                f"[make_prompt_cache] found max_kv_bytes = {max_kv_bytes!r} beside max_kv_size or "
                "budgets, expected one of them."
            )
        max_kv_size = fit_bytes(
            model, max_kv_bytes, draft_model=draft_model, layers=layers, **settings
        ).config
        settings = {}
    if draft_model is not None:
        own = make_prompt_cache(model, max_kv_size, budgets=budgets, layers=layers, **settings)
        return own + make_prompt_cache(draft_model, max_kv_size, layers=layers, **settings)
    config = _config(max_kv_size, settings)
    name = model_name(model)
    _refuse_unserved(model)
    config = _for_model(model, config)
    linked = bool(_modules_of(model) & _INDEXED)
    stock = mlx_lm_cache.make_prompt_cache(model)
    places = [layer for layer, cache in enumerate(stock) if _evicts(cache)]
    ends = {*places[: config.turbo_guard], *places[len(places) - config.turbo_guard :]}
    caches = [
        _replaced(
            cache, _guarded(config) if layer in ends else config, f"{name} layer {layer}", linked
        )
        for layer, cache in enumerate(stock)
    ]
    evicting = list(evicting_caches(caches))
    if not evicting:
        raise ValueError(
            f"[make_prompt_cache] {name} makes no plain KVCache, expected at least one layer "
            "whose rows could be evicted."
        )
    if budgets is None and layers == "probe" and config.max_kv_size is not None:
        budgets = rows_by_layer(model, config, len(evicting))
    if budgets is not None:
        configs = layer_configs(config, budgets, len(evicting))
        _give(evicting, [_for_model(model, one) for one in configs])
    for cache in evicting if linked else ():
        _check_indexed(model, cache.config)
    return caches


def fit_bytes(
    model: Module,
    max_kv_bytes: int | str,
    *,
    draft_model: Module | None = None,
    layers: str = "probe",
    **settings: Any,
) -> Sizing:
    """The settings with the most rows whose caches hold no more than ``max_kv_bytes``.

    Without ``kv_bits`` and ``kv_format``, rows stay unquantised if the model's whole context fits.
    Otherwise they have 8, 6 or 5 bits, the most at which three quarters of it fit, or 4.
    ``kv_bits=None`` leaves them unquantised. Without ``policy``, quantised rows merge if the model
    and the other settings allow it. Nothing is computed but the probe of ``layers``: the bytes are
    those of caches in a graph that is never evaluated.

    Args:
        model: an mlx_lm model.
        max_kv_bytes: bytes of all full caches of a sequence, as a number or a text such as "300MB"
            or "64MiB".
        draft_model: a draft model, whose caches have the same rows and bits, and count.
        layers: as in :func:`make_prompt_cache`.
        settings: settings of H2OConfig, except ``max_kv_size``.

    Raises:
        ValueError: not a number of bytes, fewer than the fewest rows take, or as in
            :func:`make_prompt_cache`.
    """
    if "max_kv_size" in settings:
        raise ValueError("[fit_bytes] found max_kv_size, expected max_kv_bytes alone.")
    limit = parsed_bytes(max_kv_bytes)
    merges = "policy" not in settings

    def draft_nbytes(config: H2OConfig, chunk: int = 0) -> int:
        return 0 if draft_model is None else _full_nbytes(draft_model, config, layers, chunk)

    def nbytes_of(config: H2OConfig, chunk: int = 0) -> int:
        return _full_nbytes(model, config, layers, chunk) + draft_nbytes(config, chunk)

    def config_of(rows: int, bits: int | None) -> H2OConfig:
        packs = bits is not None or "kv_format" in settings
        chosen = {"policy": Merge.name} if merges and packs else {}
        return _config(None, {"kv_bits": bits} | chosen | settings | {"max_kv_size": rows})

    def measuring(bits: int | None) -> Measure:
        return lambda rows: nbytes_of(config_of(rows, bits))

    least = least_rows(settings)
    bits = settings.get("kv_bits")
    known = "kv_bits" in settings or "kv_format" in settings

    def packs() -> bool:
        some = bits if known else PACKED_BITS
        return measured(measuring(some), least + 64) < math.inf

    served = packs()
    if merges and not served:
        merges = False
        served = packs()
    if not known:
        context = context_length(model)
        bits = PACKED_BITS if served else None
        rows = {None: context or 0} | dict.fromkeys(MORE_BITS, int((context or 0) * MOST_OF_IT))
        fitting = (bits for bits, most in rows.items() if measured(measuring(bits), most) <= limit)
        bits = next(fitting, bits) if context else bits
    config = config_of(most_rows(measuring(bits), least, limit), bits)
    peak = nbytes_of(config, PROMPT_CHUNK)
    return Sizing(config, nbytes_of(config), peak, draft_nbytes(config))


def _full_nbytes(model: Module, config: H2OConfig, layers: str, chunk: int) -> int:
    """Bytes of full caches, or of those that take in a chunk of a prompt more."""
    run: Any = model
    caches = make_prompt_cache(model, config, layers=layers)
    ours = list(evicting_caches(caches))
    budgets = [one.config.max_kv_size or 1 for one in ours]
    rows = max([*budgets, *(getattr(one, "max_size", 1) for one in caches)])
    # Dense rows of mixed precision come until they are packed, and scores wait for drafts.
    steps = config.reach + (config.group if config.mixed else 0) + 2
    most = 0
    with routing_for(model, ours):
        for tokens in (rows, chunk) if chunk else (rows, *([1] * steps)):
            run(mx.zeros((1, tokens), mx.int32), cache=caches)
            if chunk or tokens == 1:
                most = max(most, sum(cache.nbytes for cache in caches))
    return most


def beyond_context(made_for: int | None, tokens: int) -> str:
    """What a user is told of a text of so many tokens, where its model is made for fewer; empty
    where it is not."""
    if made_for is None or tokens <= made_for:
        return ""
    return (
        f"The text has {tokens:,} tokens, and the model is made for {made_for:,}: what it makes of "
        "those beyond may be poor, however many rows the cache holds."
    )


def tokens_seen(caches: Sequence[Any]) -> int:
    """Of one sequence, by those of its caches that evict."""
    return max((cache.offset for cache in evicting_caches(caches)), default=0)


@dataclass(frozen=True)
class CacheSummary:
    """What the caches of a model hold; ``str()`` says it in a line.

    layers: caches, one per layer.
    evicting: H2OKVCache among them.
    rows: rows per head of the fullest evicting cache.
    evicted: rows per head that have gone, summed over the evicting caches.
    nbytes: bytes of all caches.
    shared_out: how many rows layers may hold, where that needs a word; else empty.
    """

    layers: int
    evicting: int
    rows: int
    evicted: int
    nbytes: int
    shared_out: str = ""

    def __str__(self) -> str:
        said = f", {self.shared_out}" if self.shared_out else ""
        return (
            f"{self.evicting} of {self.layers} layers evict, {self.rows} rows, "
            f"{self.evicted} evicted, {self.nbytes:,} bytes{said}"
        )


def summary(caches: Sequence[Any], model: Module | None = None) -> CacheSummary:
    """Count layers, rows and bytes of a model's caches. With the ``model`` it says too why all
    layers have the same rows, where its probe could not be made."""
    evicting = list(evicting_caches(caches))
    return CacheSummary(
        layers=len(caches),
        evicting=sum(any(evicting_caches([cache])) for cache in caches),
        rows=max((cache.size() for cache in evicting), default=0),
        evicted=sum(cache.evicted for cache in evicting),
        nbytes=sum(cache.nbytes for cache in caches),
        shared_out=_shared_out(evicting, model),
    )


def _shared_out(caches: Sequence[H2OKVCache], model: Module | None) -> str:
    budgets = {one.config.max_kv_size or 0 for one in caches}
    if len(budgets) > 1:
        return f"{min(budgets):,} to {max(budgets):,} rows by layer"
    reason = "" if model is None or budgets <= {0} else reason_of(model)
    return f"the same rows in every layer: the model {reason}" if reason else ""


def evicting_caches(caches: Sequence[Any]) -> Iterator[H2OKVCache]:
    """The H2OKVCache among ``caches``, those inside of cache lists included."""
    for cache in caches:
        if isinstance(cache, H2OKVCache):
            yield cache
        elif isinstance(cache, mlx_lm_cache.CacheList | LinkedH2OCache):
            yield from evicting_caches(cache.caches)


def with_own_rows(caches: Sequence[Any]) -> list[Any]:
    """The caches, and copies with all rows of those that share some."""
    return [one.unshared() if isinstance(one, H2OKVCache) else one for one in caches]


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


def _evicts(cache: Any) -> bool:
    """Whether one of ours takes the place of this cache, or of one in it."""
    if type(cache) is mlx_lm_cache.CacheList:
        return any(_evicts(part) for part in cache.caches)
    return type(cache) is mlx_lm_cache.KVCache


def _guarded(config: H2OConfig) -> H2OConfig:
    """The settings of a layer that ``turbo_guard`` keeps in 8 bits."""
    return replace(config, kv_format=None, turbo_guard=0, kv_bits=8)


def _replaced(cache: Any, config: H2OConfig, name: str, linked: bool) -> Any:
    if type(cache) is mlx_lm_cache.KVCache:
        return evicting_cache(config, name=name)
    if type(cache) is mlx_lm_cache.CacheList and linked:
        return LinkedH2OCache(config, name=name)
    if type(cache) is mlx_lm_cache.CacheList:
        parts = [_replaced(part, config, name, linked) for part in cache.caches]
        return cast(Any, mlx_lm_cache.CacheList)(*parts)
    return cache


def _give(caches: list[H2OKVCache], configs: list[H2OConfig]) -> None:
    """Each evicting cache its own settings."""
    unequal = len(set(configs)) > 1
    for cache, config in zip(caches, configs, strict=True):
        if config.turbo_guard and cache.config.kv_format is None:
            config = _guarded(config)
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


def _for_model(model: Module, config: H2OConfig) -> H2OConfig:
    """The settings, with what only the model knows where they do not say it."""
    if config.context_size is None:
        config = replace(config, context_size=context_length(model))
    return _handing(model, config)


def _handing(model: Module, config: H2OConfig) -> H2OConfig:
    """The settings, with the form in which this model takes quantised rows, and masks."""
    if config.kv_handed != "packed":
        return config
    if not calls_attention(model):
        return replace(config, kv_handed="grouped" if _groups_heads(model) else "fused")
    modules = _modules_of(model)
    if not config.packs or not modules & {*_WANT_ARRAYS, "mla"}:
        return config
    return replace(config, kv_handed="latents" if "mla" in modules else "arrays")


def computes_with_keys(model: Module) -> bool:
    """Whether it is known to do so between the cache and attention, which then gets others."""
    return bool(_modules_of(model) & {*_WANT_ARRAYS, *_INDEXED, "mla"})


def _groups_heads(model: Any) -> bool:
    """Whether its own softmax has an axis of the query heads of each KV head."""
    return any(
        type(module).__module__ == "mlx_lm.models.gemma2" and getattr(module, "repeats", 1) > 1
        for module in model.modules()
    )


def _check_indexed(model: Any, config: H2OConfig) -> None:
    """While all rows fit under what the indexer picks, it leaves them all to attention."""
    rows = config.max_kv_size
    if rows is None or rows > model.args.index_topk:
        raise ValueError(
            f"[make_prompt_cache] {model_name(model)} picks {model.args.index_topk} rows by an "
            f"indexer: found max_kv_size = {rows}, expected at most that many."
        )
