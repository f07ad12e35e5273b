"""The caches of a model, with evicting caches instead of mlx_lm's unbounded ones."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import EllipsisType
from typing import Any, cast

from mlx.nn.layers.base import Module
from mlx_lm.models import cache as mlx_lm_cache

from ..caches.cache import PROMPT_CHUNK, H2OKVCache
from ..caches.heads import HeadGroups
from ..config import H2OConfig, setting_names
from ..errors import LARGEST, check
from ..operations.backends import resolve
from ..policies.h2o import H2O
from . import sizing
from .layers import LAYERS, Budgets, has_windows, known_probe, layer_configs, probe, rows_by_head
from .models import handed, refusal
from .outline import Outline, total_bytes
from .probing import BITS
from .ranks import ranks_of
from .routing import bounds, check_given, context_length, evicting_caches, model_name, parts_of
from .sizing import Sizing, fewest_rows, measured, most_rows

NAMES = {*setting_names(), "budgets", "layers", "max_kv_bytes"}
"""Arguments of :func:`make_prompt_cache` that users choose."""


def make_prompt_cache(
    model: Module, max_kv_size: int | H2OConfig | EllipsisType | None = ..., *,
    draft_model: Module | None = None, budgets: Budgets | None = None,
    max_kv_bytes: int | str | None = None, layers: str = "probe", length: int | None = None,
    **settings: Any,
) -> list[Any]:  # fmt: skip
    """One cache per layer, like mlx_lm's function of this name, but bounded by eviction.

    Only plain ``KVCache`` entries become :class:`H2OKVCache`, or with ``kv_bits``
    :class:`QuantizedH2OKVCache`; rotating, chunked and recurrent caches are left alone.

    KV heads that retrieve (find text far back) get more rows than the others; the average is
    ``max_kv_size``. These heads are found by :func:`mlx_h2o.lm.layers.probe` when the first caches
    of a model are made. A layer whose heads have unequal budgets gets :class:`HeadGroups`.

    Rows further back than the model's trained context are evicted first; ``context_size`` overrides
    the context length in the model's settings.

    Args:
        model: an mlx_lm model.
        max_kv_size: mean rows per KV head, or all the settings as an H2OConfig. Default: 256.
            None, as in mlx_lm: no limit, no row is ever evicted.
        draft_model: a draft model, whose caches follow those of the model. They have the same
            settings, except ``budgets``, which apply to the model's layers.
        budgets: a budget for each evicting layer, in order: a ``max_kv_size``, all the settings as
            an H2OConfig, or a list of these with one for each KV head. Or a JSON file with that
            list under "budgets".
        max_kv_bytes: instead of ``max_kv_size``, the bytes of all full caches together, as a number
            or a text such as "300MB"; :func:`fit_bytes` shows the rows, bits and policy.
        layers: "probe", or "equal" for the same rows in every KV head. With ``budgets``, and for
            unbounded caches, it has no effect.
        length: number of tokens that the caches will see, prompt and answer, if known.
        settings: further settings of H2OConfig.

    Raises:
        ValueError: not a model; settings out of range; a model whose attention is not supported, or
            without a cache that could evict; not exactly one budget for each evicting layer.
    """
    check_given("make_prompt_cache", model, draft_model, length)
    wanted = f"one of: {', '.join(LAYERS)}"
    check(layers in LAYERS, "layers", layers, wanted, operation="make_prompt_cache")
    of: dict[str, Any] = {"layers": layers, "length": length}
    if max_kv_bytes is not None:
        if max_kv_size is not ... or budgets is not None:
            beside = "beside max_kv_size or budgets, expected one of them."
            raise ValueError(f"[make_prompt_cache] found max_kv_bytes = {max_kv_bytes!r} {beside}")
        fitted = fit_bytes(model, max_kv_bytes, draft_model=draft_model, **of, **settings)
        max_kv_size, settings = fitted.config, {}
    if draft_model is not None:
        own = make_prompt_cache(model, max_kv_size, budgets=budgets, **of, **settings)
        return own + make_prompt_cache(draft_model, max_kv_size, **of, **settings)
    if isinstance(max_kv_size, H2OConfig) and settings:
        said = f"an H2OConfig and the settings {sorted(settings)}, expected one or the other."
        raise ValueError(f"[make_prompt_cache] found {said}")
    rows = {} if max_kv_size is ... else {"max_kv_size": max_kv_size}
    config = max_kv_size if isinstance(max_kv_size, H2OConfig) else H2OConfig.of(**settings | rows)
    name = model_name(model)
    if why := refusal(model):
        wanted = "Expected another model, or mlx_lm's own caches."
        raise ValueError(f"[make_prompt_cache] {name} cannot be served: {why}. {wanted}")
    context, form = context_length(model), functools.cache(functools.partial(handed, model))

    def for_model(config: H2OConfig) -> H2OConfig:
        """The settings, with what only the model knows filled in."""
        if config.context_size is None:
            config = config.with_budget(context_size=context)
        own = form(config.packs)
        return replace(config, kv_handed=own) if config.kv_handed == "packed" != own else config

    config = for_model(config)
    stock = mlx_lm_cache.make_prompt_cache(model)
    ranks, own = ranks_of(model), [type(one) is mlx_lm_cache.KVCache for one in parts_of(stock)]
    counts = ranks.of_layers([sum(own)])
    if 0 in counts:
        wanted = "at least one layer whose rows could be evicted, outside of evicting(model)"
        said = f"{name} makes no plain KVCache{' in a stage' * ranks.by_layer}, expected {wanted}."
        raise ValueError(f"[make_prompt_cache] {said}")
    heads = [[config]] * sum(counts)
    if budgets is not None:
        heads = layer_configs(model, config, budgets, len(heads))
    elif layers == "probe" and config.max_kv_size is not None:
        heads = rows_by_head(model, config, len(heads), length) or heads
    unequal = len({one for own in heads for one in own}) > 1
    making = iter(heads[sum(counts[: -1 - ranks.rank]) :])  # from this rank's first layer on

    def replaced(part: Any, name: str) -> Any:
        if type(part) is mlx_lm_cache.CacheList:
            return mlx_lm_cache.CacheList(*(replaced(one, name) for one in part.caches))
        if type(part) is not mlx_lm_cache.KVCache:
            return part
        own = next(making)
        configs = [for_model(one) for one in (ranks.heads.own(own) if len(own) > 1 else own)]
        found = HeadGroups.of_rows(configs, name=name)
        for one in evicting_caches([found]):
            one.unequal_budgets = unequal
        return found

    return [replaced(cache, f"{name} layer {at}") for at, cache in enumerate(stock)]


def fit_bytes(
    model: Module, max_kv_bytes: int | str, *, draft_model: Module | None = None,
    layers: str = "probe", length: int | None = None, **settings: Any,
) -> Sizing:  # fmt: skip
    """The settings with the most rows whose caches take at most ``max_kv_bytes``.

    Without ``kv_bits`` and ``kv_format``, rows stay unquantised if all tokens fit (the smaller of
    ``length`` and the model's context). Otherwise keys and values get the fewest bits that hardly
    change this model's attention: one size fewer if less than a fifth of the tokens could stay (of
    1,000 without ``length``), one more if over half could; or the most with which all tokens fit.
    ``kv_bits=None`` leaves rows unquantised. Without ``policy``, quantised rows get "h2o" if the
    model and the other settings allow it. In models with sliding windows, which hold recent tokens
    already, bits are fewer up to half of the tokens, a fifth of the rows is recent, and evicted
    rows are dropped, not folded. Apart from the model's probe nothing is computed.

    Args:
        model: an mlx_lm model. If it is split over processes, all of them must call this, and the
            rows are those that fit in each of them.
        max_kv_bytes: bytes of all full caches of a sequence, as a number or text such as "64MiB".
        draft_model: a draft model, whose caches get the same rows and bits and are included.
        layers, length: as in :func:`make_prompt_cache`.
        settings: settings of H2OConfig, except ``max_kv_size``.

    Raises:
        ValueError: not a number of bytes, too few bytes for any rows, or as in
            :func:`make_prompt_cache`.
    """
    if "max_kv_size" in settings:
        raise ValueError("[fit_bytes] found max_kv_size, expected max_kv_bytes alone.")
    check_given("fit_bytes", model, draft_model, length)
    limit = sizing.parsed_bytes(max_kv_bytes)
    models: Any = (model,) if draft_model is None else (model, draft_model)
    outlines = [one if isinstance(one, Outline) else Outline(one) for one in models]
    ranks, windows, choose = ranks_of(model), has_windows(outlines[0]), "policy" not in settings
    scarce = sizing.PLENTY if windows else sizing.SCARCE

    def config_of(bits: _Bits, rows: int) -> H2OConfig:
        packing = {"kv_bits": bits[0]} | ({} if bits[1] is None else {"v_bits": bits[1]})
        packs = choose and (bits[0] is not None or "kv_format" in settings)
        chosen = {"policy": H2O.name, "fold": not windows} if packs else {}
        found = H2OConfig.of(**packing | chosen | settings | {"max_kv_size": rows})
        if not (packs and windows) or settings.keys() & {"heavy_size", "recent_size"}:
            return found
        recent = max(1, (rows - found.budget.protected) // sizing.RECENT)
        return found.with_budget(heavy_size=None, recent_size=recent)

    @functools.cache
    def each_nbytes(bits: _Bits, rows: int, chunk: int = 0) -> list[int]:
        """Bytes for the model, and for the draft model."""
        of = {"layers": layers, "length": length}
        return [_full_nbytes(one, config_of(bits, rows), of, chunk) for one in outlines]

    def nbytes(bits: _Bits) -> Callable[[int], int]:
        return lambda rows: -ranks.least(-sum(each_nbytes(bits, rows)))[0]

    least = functools.cache(lambda bits: fewest_rows(functools.partial(config_of, bits), LARGEST))
    most = functools.cache(lambda bits: most_rows(nbytes(bits), least(bits), limit))
    context, why = context_length(model), ""
    bits: _Bits = settings.get("kv_bits"), None
    # No cache has fewer rows than the least.
    longest = min((max(tokens, least(bits)) for tokens in (length, context) if tokens), default=0)
    known = "kv_bits" in settings or "kv_format" in settings
    free: _Bits = bits if known else sizing.fewest_bits(probe(model).errors)
    choose = choose and measured(nbytes(free), least(free)) < math.inf
    served = measured(nbytes(free), least(free)) < math.inf
    if served and not (known or (longest and measured(nbytes(bits), longest) <= limit)):
        bits, why = free, "the fewest that cost nothing"
        tokens = min(length or sizing.SOME, context or sizing.SOME)
        if (rows := most(bits)) * scarce < tokens:
            said = "half" if windows else "a fifth"
            bits, why = _one_size(bits, -1), f"few, since less than {said} of the tokens stay"
        elif rows < longest < rows * sizing.PLENTY:
            bits, why = _one_size(bits, 1), "more, since over half of the tokens stay"
        while 0 < longest <= most(bits):
            keys, values = _one_size(bits, 1)
            larger = [(keys, values), (keys, bits[1]), (bits[0], values)]
            more = next((one for one in larger if measured(nbytes(one), longest) <= limit), bits)
            if more == bits:
                break
            bits, why = more, "the most that hold every token"
    rows = most(bits)
    full, peak = each_nbytes(bits, rows), sum(each_nbytes(bits, rows, PROMPT_CHUNK))
    return Sizing(config_of(bits, rows), sum(full), peak, sum(full[1:]), why)


_Bits = tuple[int | None, int | None]
"""Bits of keys and of values; None: unquantised keys, and values like the keys."""


def _one_size(bits: _Bits, step: int) -> _Bits:
    """The next larger or smaller number of bits: step 1 or -1."""
    most = len(BITS) - 1
    found = [one and BITS[min(max(BITS.index(one) + step, 0), most)] for one in bits]
    return found[0], found[1]


def _full_nbytes(outline: Outline, config: H2OConfig, shared: dict[str, Any], chunk: int) -> int:
    """The most bytes between steps while a text fills caches, or while they then read a chunk."""
    if resolve().commits_pages():  # preallocated pages take no memory until rows are written
        config = config.with_budget(preallocate=False)
    caches = make_prompt_cache(cast(Any, outline), config, **shared)
    full = max((most for _, most in bounds(caches)), default=1) + 1
    rows_at = next(evicting_caches(caches)).config.rows_at
    ends = [*(tokens for tokens, _ in rows_at), full]  # where rows are shared out anew
    counts = [end - start for start, end in pairwise([0, *ends])]
    most = own = 0
    # Scores wait for drafts. Dense rows of mixed precision have their room from the start.
    for filled in outline.fed(caches, *counts, *([chunk] if chunk else [1] * (config.reach + 2))):
        ours = list(evicting_caches(filled))
        held, own = sum(one.held_nbytes for one in ours), total_bytes(ours)
        most = max(most, own)
    # mlx_lm's windows hold a whole chunk until the next token.
    return most + total_bytes(filled) - own + (held - own if chunk else 0)


def beyond_context(made_for: int | None, tokens: int) -> str:
    """The warning for a text of this many tokens if its model was trained on fewer; otherwise
    empty."""
    if made_for is None or tokens <= made_for:
        return ""
    said = f"The text has {tokens:,} tokens, and the model was trained on {made_for:,}: quality"
    return f"{said} beyond that may be poor, however many rows the cache holds."


def rows_held(caches: Iterable[Any]) -> tuple[int, int]:
    """Rows per head of the fullest evicting cache, and the evicted rows of all caches."""
    evicting = list(evicting_caches(caches))
    return max((one.size() for one in evicting), default=0), sum(one.evicted for one in evicting)


def summary(caches: Sequence[Any], model: Module | None = None) -> str:
    """What the caches of a model hold, in one line: layers, rows and bytes, and how rows are shared
    out. With the ``model``, it also says why all KV heads have the same rows if the model could
    not be probed."""
    budgets = [{one.config.max_kv_size or 0 for one in evicting_caches([own])} for own in caches]
    layers, (rows, evicted) = sum(map(any, budgets)), rows_held(caches)
    said = f"{layers} of {len(caches)} layers evict, {rows} rows, {evicted} evicted, "
    said += f"{total_bytes(caches):,} bytes"
    if len(found := set[int]().union(*budgets)) > 1:
        return f"{said}, {min(found):,} to {max(found):,} rows by KV head"
    if any(found) and (why := known_probe(model)) is not None and why.reason:
        said += f", the same rows for every KV head: the model {why.reason}"
    return said


def budgets_of(caches: Sequence[Any]) -> list[Any]:
    """Rows of each evicting layer, or a list of the rows of its KV heads, as ``budgets`` takes."""
    found: list[Any] = []
    for cache in caches:
        if isinstance(cache, HeadGroups):
            groups = zip(cache.heads, cache.caches, strict=True)
            rows = {head: one.config.max_kv_size for heads, one in groups for head in heads}
            found.append([rows[head] for head in sorted(rows)])
        elif isinstance(cache, mlx_lm_cache.CacheList):
            found += budgets_of(cache.caches)
        elif isinstance(cache, H2OKVCache):
            found.append(cache.config.max_kv_size)
    return found
