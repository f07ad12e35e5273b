"""Budgets per layer or KV head: from a list, from a file, or by how much each head retrieves.

Most heads attend nearby; a few retrieve from far back in the text. Their rows decide what a model
recalls, and the others need fewer. :mod:`mlx_h2o.lm.probing` finds them.
"""

import contextlib
import functools
import json
import logging
import math
import os
import weakref
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

from ..blas import say_slow_blas
from ..config import H2OConfig, SettingError
from .files import write_text
from .models import computes_with_keys, fingerprint, stock_caches
from .outline import Outline
from .probing import BITS, Probe, gives
from .ranks import ranks_of
from .routing import calls_attention, context_length, int_setting, model_name, parts_of
from .sizing import fewest_rows

LAYERS = ("probe", "equal")
"""How rows are shared out over layers and KV heads that have no budgets of their own."""
TOKENS = 128
"""Random tokens that the probe reads twice."""
FLOOR = 0.45
"""Least rows of any head, relative to the mean. It matters: the losses of heads do not add up."""
FLOOR_BESIDE_WINDOWS = 0.2
"""The same in a model with sliding-window layers, which hold recent tokens already."""
BEST = 0.1
"""A head retrieves if it gives at least this part of what the best head gives."""
APART = 1.5
"""Heads become a group of their own if they need this many times the rows of their layer's rest."""
GROWTH = 1.125
"""Rows are shared out anew whenever a text has grown by this factor: wide heads get more."""

_Own = int | H2OConfig
Budgets = Sequence[_Own | Sequence[_Own]] | str | PathLike[str]
"""Per evicting layer: ``max_kv_size``, or all settings, or a list of these, one for each KV head;
or a file that holds them."""


def layer_configs(
    model: Any, config: H2OConfig, budgets: Budgets, layers: int
) -> list[list[H2OConfig]]:
    """The settings of each KV head of each evicting layer, or of all of its heads at once. Heads
    with more rows than the mean of the numbers in ``budgets`` do not fold.

    Raises:
        ValueError: not one budget for each layer, or for each KV head of one; an invalid budget, or
            a file without any.
    """
    given: Any = read_budgets(budgets) if isinstance(budgets, str | PathLike) else budgets
    count = len(given) if isinstance(given, list | tuple) else f"{given!r} as"
    if count != layers:
        said = f"found {count} budgets, expected one for each of the {layers} layers that evict."
        raise ValueError(f"[make_prompt_cache] {said}")
    lists = [own if isinstance(own, list | tuple) and own else [own] for own in given]
    counts = [len(own) if isinstance(own, list | tuple) else 0 for own in given]
    ranks = ranks_of(model)
    known = ranks.of_layers(Outline(model).heads) if any(counts) else counts
    for layer, (found, heads) in enumerate(zip(counts, known, strict=True)):
        heads *= ranks.heads.size
        if found and heads not in (0, found):
            said = f"budgets[{layer}] is of {found} KV heads, expected {heads}"
            raise ValueError(f"[make_prompt_cache] {said} as {model_name(model)} has.")
    of_layer = [sum(own) / len(own) for own in lists if {*map(type, own)} == {int}]
    mean = sum(of_layer) / (len(of_layer) or 1)
    return [[_config(config, one, mean) for one in own] for own in lists]


def _config(config: H2OConfig, budget: Any, mean: float) -> H2OConfig:
    wanted = "an int, an H2OConfig, or a list of these, one for each KV head"
    said = f"is {budget!r}, expected {wanted}."
    if isinstance(budget, H2OConfig):
        if budget.kv_bits == config.kv_bits:
            return budget
        said = f"has kv_bits {budget.kv_bits}, expected {config.kv_bits} as the other settings."
    elif isinstance(budget, int) and not isinstance(budget, bool):
        try:
            return _with_rows(config, budget, mean)
        except SettingError as error:
            said = f"is {budget!r}, {error.told()}"
    raise ValueError(f"[make_prompt_cache] a budget {said}")


def _with_rows(config: H2OConfig, rows: int, mean: float) -> H2OConfig:
    """The settings of heads with this many rows. Those with more than the mean retrieve, and drop
    evicted rows: folding blurs what they look for."""
    found = config.scaled(rows)
    drops = rows > mean and found.folds
    return H2OConfig.of(**found.named() | {"fold": False}) if drops else found


def read_budgets(path: str | PathLike[str]) -> Sequence[Any]:
    """The budgets of a file; raises ValueError if it has none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # also if the text is not UTF-8
        why = getattr(error, "strerror", error)
        said = f"budgets are {str(path)!r:.200}, expected a JSON file: {why}."
        raise ValueError(f"[make_prompt_cache] {said}") from error
    if not isinstance(found, dict) or not isinstance(found.get("budgets"), list):
        said = f'holds {type(found).__name__}, expected an object with a list under "budgets".'
        raise ValueError(f"[make_prompt_cache] {path} {said}")
    return cast(list[Any], found["budgets"])


_LOG = logging.getLogger("mlx_h2o")
_known: dict[int, Probe] = {}  # by the id of each model, as long as it lives


def probe(model: Any) -> Probe:
    """The probe of a model, with layers in the order of its caches.

    It runs once, after a line in the log: one forward pass of 128 tokens and one of 1 + H times as
    many, for H KV heads in a layer; logits only in pipelines. A file in the user's cache folder
    (``MLX_H2O_CACHE``, default ``~/.cache/mlx-h2o``), named by the weights' fingerprint, keeps the
    result. The model, mlx_lm and the random state are left as they were.

    Args:
        model: an mlx_lm model, or the outline of one.
    """
    model = model.model if isinstance(model, Outline) else model
    if (found := known_probe(model)) is None:
        found = _known[id(model)] = _probed(model)
        weakref.finalize(model, _known.pop, id(model), None)
    return found


def known_probe(model: Any) -> Probe | None:
    """The probe of a model if this process has made it already."""
    return _known.get(id(model))


def rows_by_head(
    model: Any, config: H2OConfig, layers: int, length: int | None
) -> list[list[H2OConfig]] | None:
    """The settings of each KV head of each evicting layer: on average at most
    ``config.max_kv_size`` rows per head, at any length of the text, and for no head more than
    ``length`` tokens fill. Heads with more than the mean do not fold.

    None: all heads get the same, since no head stands out or the model cannot be probed.
    """
    found = probe(model).gives
    if len(found) != layers:
        return None
    known = [tokens for tokens in (length, config.context_size) if tokens]
    most = min(known, default=32 * cast(int, config.max_kv_size))  # tokens of a text
    return _shared_out(found, config, has_windows(model), most)


def has_windows(model: Any) -> bool:
    """Whether a model has sliding-window layers, which hold recent tokens."""
    here = mlx_lm_cache.RotatingKVCache in map(type, parts_of(stock_caches([model])))
    return any(ranks_of(model).gathered(here))


@functools.lru_cache(16)
def _shared_out(
    gives: tuple[tuple[float, ...], ...], config: H2OConfig, windows: bool, most: int
) -> list[list[H2OConfig]] | None:
    rows, parts = cast(int, config.max_kv_size), parts_of_mean(gives, windows)
    least, fixed = fewest_rows(config.scaled, rows), config.protected
    shared = functools.partial(shares, parts, rows, least=least, fixed=fixed)
    by_head = shared(most=most)
    if all({*layer} == {rows} for layer in by_head):
        return None
    lengths = [] if config.mixed or config.preallocate else [rows]
    while lengths and lengths[-1] * GROWTH < max(map(max, by_head)):  # where the widest are full
        lengths.append(int(lengths[-1] * GROWTH) + 1)
    shorter = [(tokens, shared(most=tokens)) for tokens in lengths]
    found = []
    for layer, own in enumerate(by_head):
        configs = {}
        for level in {*own}:
            heads = [head for head, many in enumerate(own) if many == level]
            means = [sum(each[layer][at] for at in heads) // len(heads) for _, each in shorter]
            rows_at = tuple(zip(lengths, means, strict=True))
            configs[level] = _with_rows(config, level, rows).with_budget(rows_at=rows_at)
        found.append([configs[many] for many in own])
    return found


def shares(
    parts: Sequence[Any], rows: int, *, least: int = 1, most: int | None = None, fixed: int = 0
) -> list[list[int]]:
    """Rows of each KV head of each layer, on average at most ``rows``.

    Rows that a short text cannot fill go to other heads. So as a text grows, wide heads take rows
    from narrow ones, and never the other way round: evicted rows cannot come back.

    Args:
        parts: from ``parts_of_mean``.
        rows: mean rows per head.
        least: fewest rows of a head that the settings allow.
        most: most rows of a head that a text can fill.
        fixed: rows that every head has besides those that are shared out.
    """
    mean = rows - fixed
    top = (most or 2**31) - fixed
    if least >= rows or top <= mean:
        return [[rows] * len(layer) for layer in parts]
    share, low = np.concatenate(parts), least - fixed
    # The sum is piecewise linear in the level: it bends where a head leaves its floor or is full.
    levels = np.sort(np.concatenate([low / share, top / share]))
    sums = np.clip(levels[:, None] * share, low, top).sum(axis=1)
    level = np.interp(mean * share.size, sums, levels)
    filled = (np.floor(np.clip(level * layer, low, top) + 1e-6) for layer in parts)
    return [(fixed + layer).astype(int).tolist() for layer in filled]


def parts_of_mean(given: Sequence[Sequence[float]], windows: bool = False) -> list[Any]:
    """The share of each head of each layer, relative to the mean, by what the probe says they give.

    Every head gets FLOOR. The rest goes to the heads that retrieve, in proportion to the square
    root of what they give; in a model with sliding windows every head gets FLOOR_BESIDE_WINDOWS,
    and heads that retrieve get equal parts of the rest. The heads of a layer have two shares, or
    one if the upper is less than APART times the lower.
    """
    floor, power = (FLOOR_BESIDE_WINDOWS, 0.0) if windows else (FLOOR, 0.5)
    gains = [np.array(layer, float) for layer in given]
    least = BEST * max(layer.max() for layer in gains)
    wide = [np.where(layer >= least, layer**power, 0) for layer in gains]
    mean = np.concatenate(wide).mean() or 1
    return [_two_levels(floor + (1 - floor) * layer / mean) for layer in wide]


def _two_levels(share: Any) -> Any:
    """The shares of a layer's heads, reduced to at most two levels with the same sum."""

    def spread(level: float) -> float:
        parts = share[share < level], share[share >= level]
        return sum(float(part.var() * part.size) for part in parts)

    levels = sorted({*share.tolist()})
    upper = share >= min(levels[1:], key=spread, default=levels[0])
    means = [share[part].mean() if part.any() else math.inf for part in (upper, ~upper)]
    return np.where(upper, *means) if means[0] >= APART * means[1] else share * 0 + share.mean()


def _probed(model: Any) -> Probe:
    ranks, stock = ranks_of(model), mlx_lm_cache.make_prompt_cache(model)
    growing = ranks.of_layers([sum(type(one) is mlx_lm_cache.KVCache for one in stock)])
    if 0 in growing or any(type(one) is mlx_lm_cache.CacheList for one in stock):
        return Probe((), "has lists of caches in the place of some that grow")
    if not calls_attention(model):
        return Probe((), "does not call mlx_lm's attention, which would show where it looks")
    if computes_with_keys(model):
        return Probe((), "computes with the keys between its caches and attention")
    vocabulary = int_setting(model, "vocab_size")
    longest = context_length(model) or 2 * TOKENS
    tokens = min(TOKENS, longest // 2)
    if vocabulary is None or tokens < 80:  # fewer tell too little
        return Probe((), f"has a vocabulary of {vocabulary} and a context of {longest} tokens")
    folder = os.path.expanduser(os.environ.get("MLX_H2O_CACHE") or "~/.cache/mlx-h2o")
    place = os.devnull if folder[0] == "~" else folder  # a user without a home keeps nothing
    file = Path(place, "layers", f"{fingerprint(model)}.json")
    found = _read(file, sum(growing))
    if not ranks.least(found is not None)[0]:  # all ranks probe, or none
        _LOG.warning("Probing once which heads of %s retrieve; it takes a while", model_name(model))
        say_slow_blas()
        found = gives(model, vocabulary, tokens)
        if not found.reason:
            with contextlib.suppress(OSError):  # then it is probed again next time
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, json.dumps({"gives": found.gives, "errors": found.errors}))
    return cast(Probe, found)


def _read(file: Path, layers: int) -> Probe | None:
    """The probe in a file, if there is one of this many layers."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        both = said["gives"], said["errors"]
        given, errors = (tuple(tuple(map(float, one)) for one in side) for side in both)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    whole = len(given) == layers and all(given) and [*map(len, errors)] == [len(BITS)] * 2
    numbers = all(0 <= one < math.inf for side in (*given, *errors) for one in side)
    return Probe(given, errors=errors) if whole and numbers else None
