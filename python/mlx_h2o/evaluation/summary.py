"""Measurements, averaged and compared: an arm against the full cache and against a window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arms import Arm, at_bytes_of
from .run import Evaluation
from .statistics import Difference, paired

__all__ = ["Summary", "summaries", "window_of"]

Figures = npt.NDArray[np.float64]
"""[documents, seeds]."""

DIVISIONS = ("wording", "depth", "needles", "length", "reading")

OF_LAYERS: dict[str, Callable[..., Any]] = {"min": np.min, "median": np.median, "max": np.max}


@dataclass(frozen=True)
class Summary:
    """One measure of one arm, averaged over documents and seeds.

    measure: "loss" and "kld" in nats, "top1", "recall" and "recall by WHAT VALUE", shares; of
        several lengths also "loss by length TOKENS". "skipped at TOKENS tokens: min", "median" and
        "max" of the layers: the share of pairs that sparse V leaves out.
    differences: to "full" and to "window", where there are such.
    """

    arm: Arm
    measure: str
    value: float
    differences: dict[str, Difference]


def summaries(found: Evaluation) -> list[Summary]:
    """All measures of all arms. An arm of which a measurement failed has none of that measure."""
    figures = {arm.name: _figures(found, arm) for arm in found.arms}
    full = next((arm for arm in found.arms if arm.strategy.kind == "full"), None)
    lines = []
    for arm in found.arms:
        references = {"full": full, "window": window_of(arm, found.arms)}
        for measure, values in figures[arm.name].items():
            differences = {
                name: paired(values, figures[other.name][measure])
                for name, other in references.items()
                if other is not None and other is not arm and measure in figures[other.name]
            }
            lines.append(Summary(arm, measure, float(values.mean()), differences))
    return lines


def window_of(arm: Arm, arms: Sequence[Arm]) -> Arm | None:
    """The rotating window of nearly the bytes of an arm, and no more; the largest such."""
    if arm.strategy.kind == "rotating":
        return None
    near = [
        other
        for other in arms
        if other.strategy.kind == "rotating" and other.evicts and at_bytes_of(arm, other)
    ]
    return max(near, key=lambda other: other.nbytes, default=None)


def _figures(found: Evaluation, arm: Arm) -> dict[str, Figures]:
    """By measure, the means of each document and seed over the cases."""
    documents = len(found.setting["documents"])
    seeds = int(found.setting["settings"]["seeds"])
    cells: dict[str, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    tasks: dict[str, str] = {}
    failed: set[str] = set()
    for record in found.records:
        if record["strategy"] != arm.name:
            continue
        task = record["case"]["task"]
        if "error" in record:
            failed.add(task)
            continue
        # What draws nothing is measured once, and is the same with every seed.
        once = task != "needle" and not arm.strategy.seeded
        for measure, values in _measures(record, len(found.setting["settings"]["lengths"]) > 1):
            tasks[measure] = task
            for document, value in zip(record["documents"], values, strict=True):
                for seed in range(seeds) if once else (record["seed"],):
                    cells[measure][document, seed].append(value)
    measures = {}
    for measure, by_cell in cells.items():
        whole = len(by_cell) == documents * seeds
        if whole and tasks[measure] not in failed:
            measures[measure] = np.array(
                [[np.mean(by_cell[d, s]) for s in range(seeds)] for d in range(documents)]
            )
    return measures


def _measures(record: dict[str, Any], lengths: bool) -> list[tuple[str, list[float]]]:
    """The measures that a record's figures count for, of one length or of several."""
    case, figures = record["case"], record["figures"]
    if case["task"] == "ppl":
        of_length = [(f"loss by length {case['length']}", figures["loss"])] if lengths else []
        return [*figures.items(), *of_length]
    if case["task"] == "skips":
        layers = np.array(list(figures.values()))
        return [
            (f"skipped at {case['length']} tokens: {name}", pick(layers, axis=0).tolist())
            for name, pick in (OF_LAYERS.items() if figures else ())
        ]
    found = []
    for depth, values in record["figures"].items():
        found.append(("recall", values))
        of = {**case, "depth": depth.removeprefix("depth ")}
        found += [(f"recall by {name} {of[name]}", values) for name in DIVISIONS]
    return found
