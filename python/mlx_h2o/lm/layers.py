"""Which layers of a model retrieve, found without a text, and rows shared out by that.

Most layers attend nearby; a few look far back for what stood behind the same words. A model that
reads random tokens twice shows them (induction heads, Olsson et al. 2022): in the second copy their
attention gets much from far rows that it got little from in the first, where nothing repeats.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

from ..config import H2OConfig
from .budgets import scaled
from .fingerprint import fingerprint
from .routing import calls_attention, context_length, routing

__all__ = ["LAYERS", "Probe", "probe", "rows_by_layer", "shares"]

LAYERS = ("probe", "equal")
"""How rows are shared out over layers that have no budgets of their own."""

TOKENS = 192
"""Random tokens, read twice."""

RETRIEVES = 0.05
"""The least score of a layer that retrieves. Of models with random weights it is below 0.035."""

SINKS, NEAR = 4, 64
"""Rows that are not far: the first ones, and the newest that a query sees."""

PART = 1 / 4
"""Of the layers, those that retrieve, at most."""

LEAST, MOST = 0.6, 2.5
"""Rows of other layers, at least, and of those that retrieve, at most, as parts of the mean."""

_FORMAT = 1
_QUERIES = 96
"""Of each copy, from its end: all of them have far rows."""
_MODELS_KEPT = 64


@dataclass(frozen=True)
class Probe:
    """What the layers of a model did with random tokens said twice.

    scores: per layer whose cache grows, how far the output of attention moves where far rows are
        hidden, of all heads together, by the mean length of a value; the mean of the second copy
        less that of the first. Empty if they cannot be had.
    reason: why they cannot be had, in words that follow the model's name; else empty.
    """

    scores: tuple[float, ...]
    reason: str = ""


class _Watched(cast(Any, mlx_lm_cache.KVCache)):  # type: ignore[misc]
    """mlx_lm's own cache, whose layer's attention tells of its logits while it is routed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[mx.array] = []

    def update_scores(self, scores: mx.array) -> None:
        """Logits of the last queries of a copy, float32 [1, Hq, L, N]."""
        scores = scores[:, :, -_QUERIES:]
        heads, queries, keys = scores.shape[1:]
        values = self.values[..., : self.offset, :].astype(mx.float32)
        values = mx.repeat(values, heads // values.shape[1], axis=1)
        query, key = mx.arange(keys - queries, keys)[:, None], mx.arange(keys)
        near = mx.where((key < SINKS) | (key > query - NEAR), scores, -mx.inf)
        moved = (mx.softmax(scores, axis=-1) - mx.softmax(near, axis=-1)) @ values
        length = mx.sqrt(heads * mx.square(values).sum(axis=-1)).mean()
        self.found.append(mx.sqrt(mx.square(moved).sum(axis=(1, 3))).mean() / length)

    def score(self) -> mx.array:
        """The second copy against the first; of layers that share the cache, the highest."""
        first, second = mx.stack(self.found).reshape(2, -1)
        return mx.maximum(second - first, 0).max()


_known: dict[int, tuple[weakref.ref[Any], Probe]] = {}


def probe(model: Any) -> Probe:
    """The probe of a model, whose layers are in the order of its caches.

    It is made once: 384 tokens are read without logits, 2 x 384 operations for each weight beside
    the embeddings (6 teraflop for 8 billion). A file in the user's cache folder
    (``MLX_H2O_CACHE``, default ``~/.cache/mlx-h2o``) remembers it by the weights' fingerprint. The
    model, mlx_lm and the random state are left as they were.

    Args:
        model: an mlx_lm model.
    """
    held = _known.get(id(model))
    if held is not None and held[0]() is model:
        return held[1]
    found, place = _probed(model), id(model)
    _known[place] = weakref.ref(model, lambda _: _known.pop(place, None)), found
    return found


def reason_of(model: Any) -> str:
    """Why a model's probe could not be made, where it was tried; else empty."""
    held = _known.get(id(model))
    return held[1].reason if held is not None and held[0]() is model else ""


def rows_by_layer(model: Any, config: H2OConfig, layers: int) -> list[int] | None:
    """Rows of each layer that evicts, on average no more than ``config.max_kv_size``.

    None: the same for all of them, since no layer stands out, or the probe cannot be made.
    """
    rows = cast(int, config.max_kv_size)
    scores = probe(model).scores
    if len(scores) != layers:
        return None
    most = config.context_size or None
    found = shares(scores, rows, least=_least(config), most=most, fixed=config.protected)
    return None if len({*found}) == 1 else found


def shares(
    scores: Sequence[float], rows: int, *, least: int = 1, most: int | None = None, fixed: int = 0
) -> list[int]:
    """Rows of layers at two levels, together no more than ``rows`` for each.

    Up to a quarter of the layers, those of the highest scores, retrieve and get up to 2.5 times the
    mean; the others at least 0.6 of it. Floors matter: losses of layers do not add.

    Args:
        scores: of :class:`Probe`.
        rows: mean rows of a layer, at least ``least``.
        least: rows that the settings demand of a layer.
        most: rows beyond which none is of use.
        fixed: rows that every layer has, which are not shared out.
    """
    count = len(scores)
    ranked = sorted(range(count), key=lambda layer: -scores[layer])[: max(1, round(PART * count))]
    chosen = {layer for layer in ranked if scores[layer] >= RETRIEVES}
    others = count - len(chosen)
    if not chosen or not others:
        return [rows] * count
    share = min(MOST, LEAST + (1 - LEAST) * count / len(chosen))
    many = min(fixed + int(share * (rows - fixed)), max(rows, most or count * rows))
    few = max(least, (count * rows - len(chosen) * many) // others)
    many = min(many, (count * rows - others * few) // len(chosen))
    return [many if layer in chosen else few for layer in range(count)]


def _least(config: H2OConfig) -> int:
    """The fewest rows that go with the other settings."""

    def served(rows: int) -> bool:
        with contextlib.suppress(ValueError):
            return bool(scaled(config, rows))
        return False

    known = cast(int, config.max_kv_size)
    return bisect_left(range(known), True, lo=config.protected + 1, key=served)


def _probed(model: Any) -> Probe:
    if not calls_attention(model):
        return Probe((), "does not call mlx_lm's attention, which would show where it looks")
    if (longest := context_length(model) or 2 * TOKENS) < 2 * TOKENS:
        return Probe((), f"is made for {longest} tokens, less than the {2 * TOKENS} of the probe")
    watched: list[_Watched] = []
    caches = [_watching(one, watched) for one in mlx_lm_cache.make_prompt_cache(model)]
    if len(watched) < 2:
        return Probe((), "has fewer than two layers whose caches grow")
    kept = _kept()
    key = fingerprint(model)
    scores = kept.get(key)
    if not _fits(scores, len(watched)):
        scores = _scores(model, caches, watched)
        if scores is None:
            return Probe((), "hides which of its layers attention is of")
        _keep(dict([*kept.items(), (key, scores)][-_MODELS_KEPT:]))
    return Probe(tuple(scores))


def _watching(cache: Any, watched: list[_Watched]) -> Any:
    """A cache like it, in which those that grow are watched."""
    if type(cache) is mlx_lm_cache.KVCache:
        watched.append(_Watched())
        return watched[-1]
    if type(cache) is mlx_lm_cache.CacheList:
        parts = [_watching(part, watched) for part in cache.caches]
        return cast(Any, mlx_lm_cache.CacheList)(*parts)
    return cache


def _scores(model: Any, caches: list[Any], watched: list[_Watched]) -> list[float] | None:
    embeddings = (nn.Embedding, nn.QuantizedEmbedding)
    sizes = [one.weight.shape[0] for one in model.modules() if isinstance(one, embeddings)]
    once = mx.array(np.random.default_rng(0).integers(0, max(sizes), TOKENS))[None]
    with routing(model):
        for _ in range(2):
            model(once, cache=caches)  # nobody evaluates its logits
    if not all(one.found for one in watched):
        return None
    found = mx.stack([one.score() for one in watched])
    return [round(score, 4) for score in cast(list[float], found.tolist())]


def _file() -> Path:
    folder = os.environ.get("MLX_H2O_CACHE") or Path("~/.cache/mlx-h2o").expanduser()
    return Path(folder) / "layers.json"


def _kept() -> dict[str, Any]:
    """Scores of models that were probed before, by their fingerprints."""
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
        return dict(found["scores"]) if found["format"] == _FORMAT else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _keep(scores: dict[str, Any]) -> None:
    file = _file()
    beside = file.with_name(f".{uuid.uuid4().hex}.json")
    with contextlib.suppress(OSError):  # then it is probed again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_text(json.dumps({"format": _FORMAT, "scores": scores}), encoding="utf-8")
            os.replace(beside, file)
        finally:
            beside.unlink(missing_ok=True)


def _fits(scores: Any, layers: int) -> bool:
    return (
        isinstance(scores, list)
        and len(scores) == layers
        and all(isinstance(one, float) and 0 <= one <= 2 for one in scores)
    )
