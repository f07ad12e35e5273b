"""What the measured policies say: paired intervals, the table, and the default that they decide."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_h2o.evaluation.statistics import Difference, paired

__all__ = ["Decision", "Difference", "decide", "paired", "table"]

REFERENCE = "window"
_RECALLS = ("recall_by_token", "recall_by_chunk")
CONTROLS = ("random",)
"""Policies that are measured to compare with, and never the default."""


def _per_document(runs: dict[str, Any], policy: str, key: str) -> list[float]:
    """A figure of each document, averaged over the budgets."""
    figures = [run[key] for run in runs[policy].values()]
    return [float(mean) for mean in np.mean(figures, axis=0)]


def _recall(runs: dict[str, Any], policy: str) -> list[float]:
    """Share of its facts that each document keeps, over budgets and both ways of reading."""
    ways = [_per_document(runs, policy, key) for key in _RECALLS]
    return [float(mean) for mean in np.mean(ways, axis=0)]


@dataclass(frozen=True)
class Decision:
    """The policy that the rule chooses, and why in figures: ``as_json`` of it is committed."""

    default: str
    disqualified: dict[str, Difference]
    behind: dict[str, Difference]
    contenders: tuple[str, ...]


def decide(runs: dict[str, Any]) -> Decision:
    """The rule of docs/policies.md.

    A policy whose loss is significantly above that of ``window``, which mlx_lm's users have
    already, is out. Of the others the one that recalls most facts wins. Those that do not recall
    significantly less than it are contenders, and the lowest loss decides among them.

    Args:
        runs: by policy, by budget: "loss", "recall_by_token" and "recall_by_chunk", each with one
            figure per document.
    """
    candidates, disqualified = [], {}
    reference = _per_document(runs, REFERENCE, "loss")
    for policy in runs:
        worse = paired(_per_document(runs, policy, "loss"), reference)
        if worse.low > 0:
            disqualified[policy] = worse
        elif policy not in CONTROLS:
            candidates.append(policy)
    best = max(candidates, key=lambda policy: sum(_recall(runs, policy)))
    behind, contenders = {}, []
    for policy in candidates:
        less = paired(_recall(runs, policy), _recall(runs, best))
        if less.high < 0:
            behind[policy] = less
        else:
            contenders.append(policy)
    default = min(contenders, key=lambda policy: sum(_per_document(runs, policy, "loss")))
    return Decision(default, disqualified, behind, tuple(contenders))


def table(result: dict[str, Any]) -> str:
    """Markdown: one line per policy, three columns per budget."""
    budgets = [str(budget) for budget in result["settings"]["budgets"]]
    head = ["policy"]
    for budget in budgets:
        head += [f"{budget}: perplexity", "by token", "by chunk"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], ["full cache"]]
    full = result["full"]
    for budget in budgets:
        lines[-1].append(_perplexity(full["loss"][budget]))
        lines[-1] += [_share(full[key]) for key in _RECALLS]
    reference = result["policies"][REFERENCE]
    for policy, runs in result["policies"].items():
        lines.append([f"`{policy}`"])
        for budget in budgets:
            lines[-1] += _cells(runs[budget], reference[budget])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(run: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """The three figures; a sign where the interval of the difference to ``window`` leaves out 0."""
    cells = [_perplexity(run["loss"]) + _sign(paired(run["loss"], reference["loss"]))]
    cells += [_share(run[key]) + _sign(paired(run[key], reference[key])) for key in _RECALLS]
    return cells


def _perplexity(losses: list[float]) -> str:
    return f"{math.exp(float(np.mean(losses))):.2f}"


def _share(shares: list[float]) -> str:
    return f"{float(np.mean(shares)):.0%}"


def _sign(difference: Difference) -> str:
    return ("+" if difference.mean > 0 else "-") if difference.significant else ""
