"""benchmarks/quality_statistics.py: shares and their intervals, what was reached, the default."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmark_scripts import script

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def statistics():
    with script("quality_statistics") as module:
        yield module


def test_a_share_is_of_sums_and_paired(statistics):
    chance = np.random.default_rng(0)
    whole = chance.uniform(1, 100, (15, 3))
    found = statistics.share(0.25 * whole, whole)
    assert [found.value, found.low, found.high] == pytest.approx([0.25] * 3)
    noisy = statistics.share(0.25 * whole + chance.normal(0, 10, whole.shape), whole)
    assert noisy.low < noisy.value < noisy.high
    assert noisy.high - noisy.low > 0.02


def record(task, strategy, seed, values, **case):
    figures = {"loss": values} if task == "ppl" else {"depth 0.1": values, "depth 0.5": [1, 1]}
    return {
        "case": {"task": task, **case},
        "documents": [0, 1],
        "seed": seed,
        "strategy": strategy,
        "figures": figures,
    }


def test_figures_are_of_documents_and_seeds(statistics):
    result = {
        "settings": {"seeds": 2},
        "documents": [{}, {}],
        "measurements": [
            record("ppl", "full", 0, [3.0, 4.0]),
            record("ppl", "other", 0, [5.0, 5.0]),
            *(
                record("needle", "full", seed, [seed, 0], reading=reading)
                for seed in (0, 1)
                for reading in ("chunk", "token")
            ),
            record("needle", "full", 1, [0, 0], reading="token", wording="is"),
        ],
    }
    assert statistics.figures(result, "full", "loss").tolist() == [[3, 3], [4, 4]]
    recall = statistics.figures(result, "full", "recall")
    assert recall.tolist() == [[0.5, pytest.approx(5 / 6)], [0.5, 0.5]]


@pytest.mark.parametrize("model", ["demo", "llama"])
def test_the_committed_results_decide_the_default_of_a_budget_in_bytes(statistics, model):
    result = json.loads((RESULTS / f"quality_{model}.json").read_text())
    assert result["settings"]["seeds"] >= 3 and len(result["documents"]) >= 15
    assert statistics.chosen(result).default == "h2o"
