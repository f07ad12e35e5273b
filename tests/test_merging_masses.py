"""benchmarks/merging_masses.py: its rule is that of the caches, and what it knows changes it."""

from __future__ import annotations

import argparse

import mlx.core as mx
import pytest

from benchmark_scripts import script


@pytest.fixture(scope="module")
def bound():
    with script("merging_masses") as module:
        yield module


@pytest.mark.slow
def test_the_rule_is_that_of_the_caches(bound):
    args = argparse.Namespace(corpora=None, documents=1, length=170, facts=2, budgets=[64])
    result = bound.of_model("demo", args)
    figures = result["rows"]["64"]["figures"]
    assert figures["merge"]["loss"] == pytest.approx(figures["caches"]["loss"], abs=1e-3)
    assert figures["merge"]["recall"] == figures["caches"]["recall"]
    for arm in [arm for arm in bound.ARMS if arm != "merge"]:  # what is known changes what merges
        assert abs(figures[arm]["loss"][0] - figures["merge"]["loss"][0]) > 1e-4, arm


def test_masses_are_of_the_attention_that_comes_later(bound):
    weights = mx.array(
        [[[[1.0, 0, 0, 0], [0.25, 0.75, 0, 0], [0.5, 0.25, 0.25, 0], [0.1, 0.6, 0.2, 0.1]]]]
    )
    later = bound.mean_later(weights)[0].tolist()
    assert later == pytest.approx([0.85 / 3, 0.85 / 2, 0.2, 0])
    assert bound.most_repeated(weights)[0].tolist() == pytest.approx([0.5, 0.6])
