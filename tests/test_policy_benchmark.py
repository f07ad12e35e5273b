"""benchmarks/policies.py: figures of documents side by side, the statistics, the rule."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from benchmark_scripts import script
from mlx_h2o import evaluate, policies

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    with script("policies") as module:
        yield module


@pytest.fixture(scope="module")
def statistics(benchmark):
    return benchmark.statistics


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["keydiff", "h2o-sum"])
def test_documents_side_by_side_are_as_alone(benchmark, tmp_path, policy):
    """The same losses and recall as mlx_h2o.evaluate finds, one document at a time."""
    model, tokenizer = mlx_h2o.load("demo")
    books = tmp_path / "books_eval"
    books.mkdir()
    words = mlx_h2o.demo.text().split()
    (books / "shuffled.txt").write_text(" ".join(sorted(words)))
    documents = benchmark.policy_documents.documents(
        tokenizer, tmp_path, length=70, facts=2, count=2
    )
    tokens = mx.array([document.planted.tokens for document in documents])

    def make():
        return mlx_h2o.make_prompt_cache(model, 40, policy=policy)

    found = benchmark.measure(model, make, tokens, documents)
    for index, document in enumerate(documents):
        text = document.planted
        alone = evaluate.teacher_forced(
            model, make(), text.tokens, first=benchmark.PROMPT, chunk=benchmark.PROMPT
        )
        np.testing.assert_allclose(np.array(found["losses"][index]), alone.losses, atol=1e-3)
        assert benchmark.mean_loss(found["losses"], 40)[index] == pytest.approx(
            np.mean(alone.losses[41 - benchmark.PROMPT :]), abs=1e-3
        )
        for key, chunk in (("recall_by_token", 1), ("recall_by_chunk", benchmark.CHUNK)):
            cache = make()
            first = benchmark.PROMPT if chunk == 1 else len(text.tokens) - 1
            evaluate.prefill(model, cache, text.tokens[:first], chunk=chunk if chunk > 1 else 32)
            for token in text.tokens[first:-1]:
                evaluate.prefill(model, cache, [token])
            asked = [
                type("Fact", (), {"prompt": (text.tokens[-1], *q.prompt), "answer": q.answer})
                for q in text.questions
            ]
            assert found[key][index] == np.mean(evaluate.recall(model, cache, asked))


def test_an_absent_corpus_is_said(benchmark, capsys):
    _, tokenizer = mlx_h2o.load("demo")
    found = benchmark.policy_documents.documents(tokenizer, None, length=100, facts=2)
    assert [document.source for document in found] == ["mlx_h2o.demo.text()"]
    assert "NO BOOKS" in capsys.readouterr().err


def test_intervals_are_paired(statistics):
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(30).tolist()
    shifted = [value + 0.1 + 0.01 * i % 0.03 for i, value in enumerate(noise)]
    found = statistics.paired(shifted, noise)
    assert 0.1 < found.low < found.mean < found.high < 0.13
    assert found.significant
    assert not statistics.paired(rng.standard_normal(30).tolist(), noise).significant


def runs(**figures) -> dict:
    """By policy (loss, recall), the same in all budgets; document i has a little more of both."""
    return {
        policy: {
            str(budget): {
                "loss": [loss + 0.01 * i for i in range(20)],
                "recall_by_token": [recall] * 20,
                "recall_by_chunk": [recall] * 20,
            }
            for budget in (64, 128)
        }
        for policy, (loss, recall) in figures.items()
    }


@pytest.mark.parametrize(
    ("figures", "default"),
    [
        # The most facts win.
        ({"window": (4.0, 0.1), "h2o-ema": (3.9, 0.2), "keydiff": (3.95, 0.6)}, "keydiff"),
        # But not at a greater loss than the window's.
        ({"window": (4.0, 0.1), "h2o-ema": (3.9, 0.2), "keydiff": (4.05, 0.6)}, "h2o-ema"),
        # Equal recall: the lower loss.
        ({"window": (4.0, 0.2), "h2o-ema": (3.9, 0.2), "keydiff": (3.95, 0.2)}, "h2o-ema"),
        # A control is never the default.
        ({"window": (4.0, 0.1), "h2o-ema": (4.2, 0.2), "random": (3.0, 0.9)}, "window"),
    ],
)
def test_the_rule(statistics, figures, default):
    assert statistics.decide(runs(**figures)).default == default


def test_the_committed_result_is_whole_and_decided_the_default(statistics):
    result = json.loads((FOLDER / "results" / "policies.json").read_text())
    assert tuple(result["policies"]) == policies.names()
    assert len(result["settings"]["documents"]) >= 20
    assert result["settings"]["budgets"] == [64, 128, 256]
    decision = statistics.decide(result["policies"])
    assert decision.default == result["decision"]["default"] == "h2o"
    # The default is the best of those that every cache can have, within routing and without.
    plain = {
        name: runs
        for name, runs in result["policies"].items()
        if not policies.build(mlx_h2o.H2OConfig(policy=name)).needs_attention
    }
    assert "window" in plain
    assert statistics.decide(plain).default == mlx_h2o.H2OConfig().policy
