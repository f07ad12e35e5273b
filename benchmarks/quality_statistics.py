"""What a run of `mlx_h2o evaluate` says of what was asked for: recall, loss, and the default."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from policy_statistics import Decision, decide

from mlx_h2o.evaluation.statistics import RESAMPLES

__all__ = ["ASKED", "Share", "asked", "at_bytes", "chosen", "figures", "share"]

Figures = npt.NDArray[np.float64]
"""[documents, seeds]."""

ASKED = {3: (0.98, 0.10), 10: (0.90, 0.25), 40: (0.80, 0.33)}
"""Of one part in so many of the full cache's bytes: the least recall, as a share of the full
cache's, and the most loss above it, as a share of the window's of these bytes."""

_LEAST, _MOST = 0.85, 1.01
"""Of the bytes that were asked for: what an arm holds."""


@dataclass(frozen=True)
class Share:
    """One sum as a part of another, and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.0%} ({self.low:.0%} to {self.high:.0%})"


def share(ours: Figures, whole: Figures) -> Share:
    """Drawn as `paired` draws: documents, and of each its seeds."""
    pairs = np.stack([ours, whole], axis=-1)
    documents, seeds, _ = pairs.shape
    chance = np.random.default_rng(0)
    which = chance.integers(0, documents, (RESAMPLES, documents, 1))
    drawn = pairs[which, chance.integers(0, seeds, (RESAMPLES, documents, seeds))].sum(axis=(1, 2))
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    return Share(float(ours.sum() / whole.sum()), float(low), float(high))


def figures(result: dict[str, Any], strategy: str, measure: str) -> Figures:
    """ "loss" or "recall" of a strategy; recall is the mean of all readings and wordings."""
    seeds, task = result["settings"]["seeds"], {"loss": "ppl", "recall": "needle"}[measure]
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in result["measurements"]:
        if one["strategy"] != strategy or one["case"]["task"] != task:
            continue
        found = [one["figures"]["loss"]] if task == "ppl" else list(one["figures"].values())
        # What draws nothing is measured once.
        for seed in range(seeds) if task == "ppl" else (one["seed"],):
            for document, values in zip(one["documents"], zip(*found, strict=True), strict=True):
                cells[document, seed].append(float(np.mean(values)))
    documents = range(len(result["documents"]))
    return np.array([[np.mean(cells[of, seed]) for seed in range(seeds)] for of in documents])


def at_bytes(result: dict[str, Any], part: int, begins: str) -> str:
    """The strategy of that beginning, a regular expression, of one part in so many of the bytes."""
    arms = result["strategies"]
    whole = next(arm["bytes"] for arm in arms if arm["name"] == "full")
    (name,) = (
        arm["name"]
        for arm in arms
        if re.match(begins, arm["name"]) and _LEAST < part * arm["bytes"] / whole < _MOST
    )
    return str(name)


def asked(result: dict[str, Any], part: int, name: str) -> tuple[Share, Share]:
    """Of a strategy: its recall as a share of the full cache's, and its loss above the full cache
    as a share of the window's."""
    window = at_bytes(result, part, "rotating")
    full = figures(result, "full", "loss")
    lost = (figures(result, one, "loss") - full for one in (name, window))
    recalled = (figures(result, one, "recall") for one in (name, "full"))
    return share(*recalled), share(*lost)


def chosen(result: dict[str, Any], parts: tuple[int, ...] = (10, 40)) -> Decision:
    """What the rule of the default chooses among rows of 4 bits of equal bytes."""
    arms = {"window": "rotating", "keydiff": r"keydiff:\d+:kv4", "merge": r"merge:\d+:kv4"}
    measures = {"loss": "loss", "recall_by_token": "recall", "recall_by_chunk": "recall"}
    runs: dict[str, Any] = {
        policy: {
            part: {
                key: figures(result, at_bytes(result, part, begins), measure).mean(axis=1)
                for key, measure in measures.items()
            }
            for part in parts
        }
        for policy, begins in arms.items()
    }
    return decide(runs)
