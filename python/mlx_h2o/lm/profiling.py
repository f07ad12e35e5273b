"""How the layers of a model attend, and budgets for each of them made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..config import H2OConfig
from ..policies import Policy, Rows
from .budgets import scaled, sizes
from .prompt_cache import evicting_caches, make_prompt_cache
from .routing import model_name, routing

_HEAVIEST = 32


@dataclass(frozen=True)
class LayerProfile:
    """Means over query heads and decoding steps (AtomGradient 2026, sec. 4.10).

    Attributes:
        entropy: of the attention weights, in nats.
        concentration: share of the total absolute logit that the 32 rows with most of it have.
        variance: of the logits of a query.
    """

    entropy: float
    concentration: float
    variance: float


@dataclass(frozen=True)
class Profile:
    """The profile of each layer that evicts, in order; ``model`` is the model's name."""

    model: str
    steps: int
    layers: tuple[LayerProfile, ...]

    def save(self, path: str | PathLike[str], budgets: Sequence[H2OConfig] | None = None) -> None:
        """Write it as JSON, and with it the sizes of each layer: a file of budgets."""
        found = asdict(self)
        if budgets is not None:
            found["budgets"] = [sizes(config) for config in budgets]
        Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Profile:
        """Read what ``save`` wrote. Raises ValueError for anything else."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            layers = tuple(LayerProfile(**layer) for layer in found["layers"])
            return cls(str(found["model"]), int(found["steps"]), layers)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"[Profile.load] {path} holds {error!r}, expected a profile that save() wrote."
            ) from error

    def by_concentration(self, config: H2OConfig) -> list[H2OConfig]:
        """The same ``max_kv_size`` in each layer, heavy and recent rows split by concentration.

        ``clip(0.5 + (ratio - 1) * 2.5, 0.3, 0.7)`` of what the sinks leave is heavy, where
        ``ratio`` is a layer's concentration over the mean of all (AtomGradient 2026, sec. 4.10,
        who found no gain by it).
        """
        mean = sum(layer.concentration for layer in self.layers) / len(self.layers)
        available = _budget("by_concentration", config) - config.sink_size
        shares = [_clip(0.5 + (x.concentration / mean - 1) * 2.5, 0.3, 0.7) for x in self.layers]
        return [
            replace(config, heavy_size=round(share * available), recent_size=None)
            for share in shares
        ]

    def by_entropy(self, config: H2OConfig, rows: int | None = None) -> list[H2OConfig]:
        """One budget for all layers together, shared out by the entropy of their attention.

        A layer that spreads its attention gets more rows, one that concentrates it fewer: its
        entropy over the mean, but at least half and at most one and a half of an equal share.

        Args:
            config: the other settings; heavy and recent sizes are scaled.
            rows: rows per head of all layers together; None: ``max_kv_size`` times layers.
                Their sum is met exactly.
        """
        count = len(self.layers)
        total = _budget("by_entropy", config) * count if rows is None else rows
        if total < count * (config.sink_size + 1):
            raise ValueError(
                f"[Profile.by_entropy] rows is {total} for {count} layers, expected at least "
                f"sink_size + 1 = {config.sink_size + 1} for each."
            )
        mean = sum(layer.entropy for layer in self.layers) / count
        weights = [_clip(layer.entropy / mean if mean else 1.0, 0.5, 1.5) for layer in self.layers]
        spare = total - count * (config.sink_size + 1)
        exact = [spare * weight / sum(weights) for weight in weights]
        given = [int(part) for part in exact]
        order = sorted(range(count), key=lambda i: (given[i] - exact[i], i))
        for layer in order[: spare - sum(given)]:
            given[layer] += 1
        return [scaled(config, config.sink_size + 1 + part) for part in given]


def profile(
    model: Module, texts: Sequence[Sequence[int]], *, prompt: int = 64, steps: int | None = None
) -> Profile:
    """Read texts token by token behind a prompt, with all rows, and watch every layer attend.

    Args:
        model: an mlx_lm model that calls mlx_lm's attention.
        texts: token ids; each longer than ``prompt``.
        prompt: tokens that are read at once, and not watched; at least 32.
        steps: at most so many tokens of each text are watched; None: all.

    Raises:
        ValueError: no texts, one that is too short, or a model that cannot be served.
    """
    if prompt < _HEAVIEST:
        raise ValueError(f"[profile] prompt is {prompt}, expected at least {_HEAVIEST} tokens.")
    short = [len(text) for text in texts if len(text) <= prompt]
    if not texts or short:
        raise ValueError(
            f"[profile] found {len(texts)} texts, of lengths {short}, expected some, of more than "
            f"{prompt} tokens each."
        )
    recorders: list[_Recorder] = []
    watched = 0
    with routing(model):
        for text in texts:
            tokens = list(text[: len(text) if steps is None else prompt + steps])
            caches = make_prompt_cache(model, H2OConfig(max_kv_size=len(tokens), policy="h2o"))
            ours = list(evicting_caches(caches))
            recorders = recorders or [_Recorder() for _ in ours]
            for cache, recorder in zip(ours, recorders, strict=True):
                cache.policy = recorder
            mx.eval(model(mx.array(tokens[:prompt])[None], cache=caches))
            for token in tokens[prompt:]:
                out = model(mx.array([[token]]), cache=caches)
                mx.eval(out, [recorder.sums for recorder in recorders])
            watched += len(tokens) - prompt
    layers = (cast(list[float], (recorder.sums / watched).tolist()) for recorder in recorders)
    return Profile(model_name(model), watched, tuple(LayerProfile(*layer) for layer in layers))


class _Recorder(Policy):
    """Watches the scores of single queries; keeps every row."""

    name = "recorder"
    needs_scores = True

    def __init__(self) -> None:
        self.sums = mx.zeros(3)

    def accumulate(self, importance: mx.array, scores: mx.array, **_: Any) -> mx.array:
        if scores.shape[2] == 1:
            logs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
            entropy = mx.mean(-mx.sum(mx.exp(logs) * logs, axis=-1))
            sizes = mx.abs(scores)
            heaviest = mx.sum(mx.topk(sizes, _HEAVIEST, axis=-1), axis=-1)
            share = mx.mean(heaviest / mx.maximum(mx.sum(sizes, axis=-1), 1e-30))
            self.sums = self.sums + mx.stack([entropy, share, mx.mean(mx.var(scores, axis=-1))])
        return mx.zeros(importance.shape)

    def rank(self, rows: Rows) -> mx.array:
        return rows.importance


def _clip(value: float, low: float, high: float) -> float:
    return max(low, min(value, high))


def _budget(operation: str, config: H2OConfig) -> int:
    if config.max_kv_size is None:
        raise ValueError(f"[Profile.{operation}] max_kv_size is None, expected a number of rows.")
    return config.max_kv_size
