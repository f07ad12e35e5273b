"""Which layers of a model retrieve, found without a text, and rows shared out by that.

Most layers attend nearby; a few look far back for what follows a token that has come before. A model
that reads random tokens twice shows them: from a token of the second copy they attend to the token
behind the same one in the first (induction heads, Olsson et al. 2022).
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
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

from ..config import H2OConfig
from .budgets import scaled
from .fingerprint import fingerprint
from .routing import calls_attention, int_setting, routing

__all__ = ["LAYERS", "Probe", "probe", "rows_by_layer", "shares"]

LAYERS = ("probe", "equal")
"""How rows are shared out over layers that have no budgets of their own."""

TOKENS = 192
"""Random tokens, read twice."""

RETRIEVES = 0.01
"""Mean attention of a layer's heads to the token behind the first copy, from which it retrieves.
Chance is a third of that."""

PART = 1 / 4
"""Of the layers, those that retrieve, at most."""

LEAST, MOST = 0.6, 2.5
"""Rows of other layers, at least, and of those that retrieve, at most, as parts of the mean."""

_FORMAT = 1
_FEWEST_TOKENS = 32
_MODELS_KEPT = 64


@dataclass(frozen=True)
class Probe:
    """What the layers of a model did with random tokens said twice.

    scores: per layer whose cache grows, the mean weight, over queries and heads, of the token
        behind the first copy. Empty if they cannot be had.
    reason: why they cannot be had, in words that follow the model's name; else empty.
    """

    scores: tuple[float, ...]
    reason: str = ""


class _Watched(cast(Any, mlx_lm_cache.KVCache)):  # type: ignore[misc]
    """mlx_lm's own cache, whose layer's attention tells of its logits while it is routed."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.found: list[mx.array] = []

    def update_scores(self, scores: mx.array) -> None:
        """Logits of the last queries, float32 [1, Hq, L, N]."""
        queries, keys = scores.shape[-2:]
        behind = mx.arange(keys - queries, keys) - (self.tokens - 1)
        weights = mx.softmax(scores, axis=-1)
        self.found.append(mx.take_along_axis(weights, behind[None, None, :, None], -1).mean())


_known: dict[int, tuple[weakref.ref[Any], Probe]] = {}


def probe(model: Any) -> Probe:
    """The probe of a model, whose layers are in the order of its caches.

    It is made once: one forward of 384 tokens without logits, 2 x 384 operations for each weight
    beside the embeddings (6 teraflop for 8 billion). A file in the user's cache folder
    (``MLX_H2O_CACHE``, default ``~/.cache/mlx-h2o``) remembers it by the weights' fingerprint. The
    model, mlx_lm and the random state are left as they were.

    Args:
        model: an mlx_lm model.
    """
    held = _known.get(id(model))
    if held is not None and held[0]() is model:
        return held[1]
    found = _probed(model)
    _known[id(model)] = weakref.ref(model, lambda _, key=id(model): _known.pop(key, None)), found
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
    most = config.context_size or int_setting(model, "max_position_embeddings")
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
    vocabulary = int_setting(model, "vocab_size")
    longest = int_setting(model, "max_position_embeddings") or 2 * TOKENS
    tokens = min(TOKENS, longest // 2)
    if vocabulary is None or tokens < _FEWEST_TOKENS:
        return Probe((), f"has a vocabulary of {vocabulary} and a context of {longest} tokens")
    watched: list[_Watched] = []
    caches = [_watching(one, tokens, watched) for one in mlx_lm_cache.make_prompt_cache(model)]
    if len(watched) < 2:
        return Probe((), "has fewer than two layers whose caches grow")
    kept = _kept()
    key = fingerprint(model)
    scores = kept.get(key)
    if not _fits(scores, len(watched)):
        scores = _scores(model, caches, watched, vocabulary)
        if scores is None:
            return Probe((), "hides which of its layers attention is of")
        _keep(dict([*kept.items(), (key, scores)][-_MODELS_KEPT:]))
    return Probe(tuple(scores))


def _watching(cache: Any, tokens: int, watched: list[_Watched]) -> Any:
    """A cache like it, in which those that grow are watched."""
    if type(cache) is mlx_lm_cache.KVCache:
        watched.append(_Watched(tokens))
        return watched[-1]
    if type(cache) is mlx_lm_cache.CacheList:
        parts = [_watching(part, tokens, watched) for part in cache.caches]
        return cast(Any, mlx_lm_cache.CacheList)(*parts)
    return cache


def _scores(
    model: Any, caches: list[Any], watched: list[_Watched], vocabulary: int
) -> list[float] | None:
    once = np.random.default_rng(0).integers(0, vocabulary, watched[0].tokens)
    with routing(model):
        model(mx.array(np.tile(once, 2))[None], cache=caches)  # nobody evaluates its logits
    if not all(one.found for one in watched):
        return None
    found = mx.stack([mx.stack(one.found).max() for one in watched])
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
        and all(isinstance(one, float) and 0 <= one <= 1 for one in scores)
    )
