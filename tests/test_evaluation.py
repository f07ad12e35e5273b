"""An evaluation from end to end: facts, statistics, measurements taken up again, files."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import shutil
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_h2o
from mlx_h2o import demo, evaluate
from mlx_h2o.evaluation import facts, output, reading, tasks
from mlx_h2o.evaluation.documents import windows
from mlx_h2o.evaluation.run import MEASUREMENTS
from mlx_h2o.evaluation.run import evaluate as evaluation
from mlx_h2o.evaluation.statistics import paired
from mlx_h2o.evaluation.strategies import parse
from mlx_h2o.evaluation.summary import summaries
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer

SETTINGS = tasks.Settings(
    documents=2, length=72, prompt=8, chunk=16, seeds=2, depths=(0.2, 0.7), needles=(1, 3),
    wordings=("secret",),
)  # fmt: skip


@pytest.fixture(scope="module")
def loaded():
    return mlx_h2o.load("demo")


@pytest.fixture(scope="module")
def tiny():
    return tiny_qwen3(head_dim=32), tiny_tokenizer()


TEXT = " ".join(f"t{token}" for token in random_prompt(170))


def evaluated(loaded, folder=None, strategies=("keydiff:32",), **more):
    texts = [("one", TEXT)]
    chosen = [parse(text) for text in strategies]
    how = {"settings": SETTINGS, "tasks": tasks.TASKS, "model_name": "tiny"} | more
    return evaluation(*loaded, texts, chosen, folder=folder, **how)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, evaluated(tiny, folder)


# What is measured


@pytest.mark.slow
def test_arms_read_the_same_and_full_is_the_reference(tiny, whole):
    found = {(one.arm.name, one.measure): one for one in summaries(whole[1])}
    assert found["full", "kld"].value == pytest.approx(0, abs=1e-5)
    assert found["full", "top1"].value == 1
    assert found["keydiff:32", "kld"].value > 1e-3
    model, tokenizer = tiny
    tokens = tokenizer.encode(TEXT)
    for measured in whole[1].records:
        if measured["strategy"] == "keydiff:32" and measured["case"]["task"] == "ppl":
            starts = [one["start"] for one in whole[1].setting["documents"]]
            for start, loss in zip(starts, measured["figures"]["loss"], strict=True):
                cache = mlx_h2o.make_prompt_cache(model, 32)
                alone = evaluate.teacher_forced(model, cache, tokens[start : start + 72], first=8)
                assert loss == pytest.approx(np.mean(alone.losses), abs=1e-3)


@pytest.mark.slow
def test_documents_beyond_the_context_of_the_model_are_noted(tiny, monkeypatch):
    said = "tokens, and the model is made for 71: "
    for made_for, times in ((72, 0), (71, 1)):
        monkeypatch.setattr(tiny[0].args, "max_position_embeddings", made_for)
        found = evaluated(tiny, tasks=("ppl",), controls=False)
        assert "\n".join(found.notes).count(f"The text has 72 {said}") == times


@pytest.mark.slow
def test_divergence_is_that_of_the_whole_distribution(loaded):
    model, tokenizer = loaded
    tokens = mx.array([tokenizer.encode(demo.text())[:24]])
    full = reading.forced(model, make_prompt_cache(model), tokens, first=8, chunk=8, keep=True)
    cache = make_prompt_cache(model, max_kv_size=10)
    found = reading.forced(model, cache, tokens, first=8, chunk=8, reference=full, keep=True)
    p, q = (
        np.exp(np.array(run.log_weights, np.float64)[0]) for run in (full, found)
    )  # fmt: skip
    p, q = p / p.sum(axis=-1, keepdims=True), q / q.sum(axis=-1, keepdims=True)
    expected = (p * np.log(p / q)).sum(axis=-1)
    np.testing.assert_allclose(np.array(found.divergences)[0], expected, atol=2e-3)
    assert expected[-1] > 0.01


@pytest.mark.slow
def test_controls_and_seeds(whole):
    found = whole[1]
    assert [arm.name for arm in found.arms if not arm.control] == ["keydiff:32"]
    assert {"full", "kv8", "kv4"} <= {arm.name for arm in found.arms}
    seeds = {(one["strategy"], one["case"]["task"]): set() for one in found.records}
    for one in found.records:
        seeds[one["strategy"], one["case"]["task"]].add(one["seed"])
    assert seeds["keydiff:32", "needle"] == {0, 1}
    assert seeds["keydiff:32", "ppl"] == {0}  # it draws nothing
    (drawn,) = {name for name, _ in seeds if name.startswith("random")}
    assert seeds[drawn, "ppl"] == {0, 1}
    losses = [
        one["figures"]["loss"]
        for one in found.records
        if one["strategy"] == drawn and one["case"]["task"] == "ppl"
    ]
    assert losses[0] != losses[1]


# Facts


@pytest.mark.parametrize("wording", facts.WORDINGS)
@pytest.mark.parametrize("kind", ["demo", "words"])
def test_facts_for_any_tokenizer(loaded, wording, kind):
    tokenizer = loaded[1] if kind == "demo" else tiny_tokenizer()
    drawn = facts.draw(tokenizer, wording, 3, random.Random(1))
    lengths = {
        (len(one.tokens), len(one.question.prompt), len(one.question.answer)) for one in drawn
    }
    assert len(lengths) == 1
    for one in drawn:
        answer = one.question.answer
        assert answer in {
            one.tokens[start : start + len(answer)] for start in range(len(one.tokens))
        }
    if kind == "demo":
        assert len({one.question.prompt for one in drawn}) == 3
        text = tokenizer.decode(list(drawn[0].question.prompt + drawn[0].question.answer))
        if wording != "ruler":
            assert drawn[0].text.startswith(text.strip())


def test_facts_stand_at_their_depths(loaded):
    tokenizer = loaded[1]
    body = tokenizer.encode(demo.text())[:200]
    for count in (1, 2, 5):
        depths = (0.7, 0.2)[:count]
        text = tasks._planted(tokenizer, body, count, depths, "secret", random.Random(0))
        assert len(text.tokens) == 200 and len(text.facts) == count
        written = tokenizer.decode(list(text.tokens))
        for depth, question in zip(depths, text.questions, strict=True):
            asked = tokenizer.decode(list(question.prompt + question.answer))
            assert written.count(asked) == 1
            assert written.index(asked) / len(written) == pytest.approx(depth, abs=0.15)


def test_what_does_not_fit_is_said(loaded):
    with pytest.raises(ValueError, match="do not fit"):
        tasks._planted(loaded[1], [5] * 30, 4, (0.5,), "secret", random.Random(0))


def test_windows_do_not_overlap(loaded):
    tokenizer = loaded[1]
    found = windows(tokenizer, [("a", demo.text()), ("b", demo.text())], count=5, length=100)
    assert [one.source for one in found] == ["a"] * 3 + ["b"] * 2
    for one, other in itertools.pairwise(found):
        assert one.source != other.source or one.start + 100 <= other.start
    tokens = tokenizer.encode(demo.text())
    assert all(one.tokens == tuple(tokens[one.start : one.start + 100]) for one in found)
    assert len(windows(tokenizer, [("a", demo.text()[:400])], count=5, length=2000)) == 1


# Statistics


def test_intervals_of_documents_and_seeds():
    """Where seeds say the same, those of documents alone; else about the two variances added."""
    rng = np.random.default_rng(0)
    documents = rng.standard_normal(40)
    alone, repeated = paired(documents, 0 * documents), paired(*_twice(documents, 0))
    assert (repeated.low, repeated.high) == pytest.approx((alone.low, alone.high))
    assert alone.high - alone.low == pytest.approx(2 * 1.96 * documents.std() / 40**0.5, rel=0.1)
    both = documents[:, None] + rng.standard_normal((40, 3))
    found = paired(both, np.zeros_like(both))
    means, within = both.mean(axis=1), both.var(axis=1).mean() / 3
    width = 2 * 1.96 * ((means.var() + within) / 40) ** 0.5
    assert found.high - found.low == pytest.approx(width, rel=0.1)
    assert math.isnan(paired([[1.0, 2.0]], [[0.0, 0.0]]).low)
    with pytest.raises(ValueError, match=r"\[paired\] shapes"):
        paired([1.0], [1.0, 2.0])


def _twice(values, other):
    return np.stack([values] * 3, axis=1), np.full((len(values), 3), float(other))


# Measurements that are kept


@pytest.mark.slow
def test_an_interrupted_run_ends_as_one_that_was_not(tiny, whole, tmp_path):
    folder, found = whole
    lines = (folder / MEASUREMENTS).read_text().splitlines(keepends=True)
    cut = [*lines[: len(lines) // 2], lines[-1][:20]]
    (tmp_path / MEASUREMENTS).write_text("".join(cut))
    said = []
    again = evaluated(tiny, tmp_path, watch=lambda text, done, total: said.append(done))
    assert said[0] == len(cut) - 2  # of the setting and of what was cut short there is nothing
    texts = [json.dumps(output.as_json(one, summaries(one), "command")) for one in (found, again)]
    assert texts[0] == texts[1]
    assert (tmp_path / MEASUREMENTS).read_text() == "".join(lines)


@pytest.mark.slow
def test_a_folder_of_something_else_is_refused(tiny, whole, tmp_path):
    shutil.copy(whole[0] / MEASUREMENTS, tmp_path)
    other = tasks.Settings(documents=2, length=72, prompt=9, chunk=16, seeds=2)
    with pytest.raises(ValueError, match="measurements of another settings"):
        evaluated(tiny, tmp_path, settings=other, tasks=["ppl"])


def test_failures_are_published(tiny, monkeypatch):
    def broken(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(tasks, "recall", broken)
    found = evaluated(tiny, strategies=("keydiff:32",), controls=False, tasks=["needle"])
    assert output.failures(found) == ["FAILED: keydiff:32, needle: RuntimeError: no room"]
    lines = summaries(found)
    assert lines == []
    result = output.as_json(found, lines, "command")
    assert "FAILED: keydiff:32" in output.as_markdown(result)


# Files


@pytest.mark.slow
def test_files_say_what_was_measured(whole, tmp_path, monkeypatch):
    found = whole[1]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    files = output.write(tmp_path, found, "mlx_h2o evaluate --model demo")
    assert [file.name for file in files] == ["results.json", "results.csv", "results.md"]
    result = json.loads(files[0].read_text())
    assert {"command", "fingerprint", "text_hash", "environment", "settings"} <= result.keys()
    assert result["environment"]["mlx_h2o"] == mlx_h2o.__version__
    assert result["strategies"][1]["window"].startswith("rotating:")
    rows = list(csv.DictReader(files[1].open()))
    loss = {row["strategy"]: row for row in rows if row["measure"] == "loss"}
    assert loss["full"]["value"] and not loss["full"]["to_full_mean"]
    difference = float(loss["keydiff:32"]["value"]) - float(loss["full"]["value"])
    assert float(loss["keydiff:32"]["to_full_mean"]) == pytest.approx(difference)
    assert float(loss["keydiff:32"]["to_window_low"]) <= float(loss["keydiff:32"]["to_window_high"])
    page = files[2].read_text()
    assert f"{math.exp(float(loss['kv4']['value'])):.2f}" in page
    assert "(control)" in page and "by depth" in page and "too narrow" in page


@pytest.mark.slow
def test_the_picture(whole, tmp_path):
    pytest.importorskip("matplotlib")
    assert output.write(tmp_path, whole[1], "command")[-1].name == "quality.png"
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
