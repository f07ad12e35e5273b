"""Layers that retrieve: how they are found, what rows they get, and where all get the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

import mlx_h2o
from mlx_h2o import H2OConfig, cli, evaluate, make_prompt_cache
from mlx_h2o.lm import layers
from mlx_h2o.lm.layers import LEAST, MOST, RETRIEVES, probe, shares
from mlx_h2o.lm.prompt_cache import evicting_caches, fit_bytes, summary
from models import tiny
from tiny_models import tiny_qwen3

FOUND = 4  # of the six layers of the demo model, the one that retrieves


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """No probe of another test is remembered."""
    monkeypatch.setenv("MLX_H2O_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(layers, "_known", {})
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def demo():
    return mlx_h2o.load("demo")[0]


def rows_of(caches) -> list[int]:
    return [cache.config.max_kv_size for cache in evicting_caches(caches)]


@drawn(
    scores=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40),
    least=st.integers(1, 50),
    more=st.integers(0, 400),
    fixed=st.integers(0, 40),
    most=st.none() | st.integers(1, 900),
)
@settings(deadline=None)
def test_shares_keep_total_floor_and_order(scores, least, more, fixed, most):
    rows = max(least, fixed + 1) + more
    found = shares(scores, rows, least=least, most=most, fixed=fixed)
    assert len(found) == len(scores) and sum(found) <= rows * len(scores)
    assert rows * len(scores) - sum(found) < len(scores)
    assert min(found) >= least
    assert min(found) >= min(rows, int(LEAST * (rows - fixed)))
    assert max(found) <= max(rows, fixed + MOST * (rows - fixed))
    assert max(found) <= max(rows, most or max(found))
    assert len({*found}) <= 2
    favoured = [score for score, one in zip(scores, found, strict=True) if one > min(found)]
    others = [score for score, one in zip(scores, found, strict=True) if one == min(found)]
    assert not favoured or (min(favoured) >= max(others) and min(favoured) >= RETRIEVES)


@pytest.mark.parametrize(
    ("scores", "rows"),
    [
        ([0.5], [100]),
        ([0.5, 0.1], [140, 60]),
        ([0.6, 0.2, 0.2], [180, 60, 60]),
        ([0.001] * 8, [100] * 8),
        ([0.0] * 7 + [0.3], [78] * 7 + [250]),  # one layer of eight: 2.5 times the mean
        ([0.3, 0.2] + [0.0] * 6, [220, 220] + [60] * 6),
    ],
)
def test_shares(scores, rows):
    assert shares(scores, 100) == pytest.approx(rows, abs=3)


def test_no_layer_gets_more_than_a_context_holds():
    scores = [0.3, 0.2] + [0.0] * 6
    assert shares(scores, 100, most=130) == [130, 130] + [90] * 6
    assert shares(scores, 100, most=80) == [100] * 8


def test_the_demo_model_has_a_layer_that_retrieves(demo):
    scores = probe(demo).scores
    assert len(scores) == 6 and probe(demo).reason == ""
    assert scores[FOUND] > 0.2 > RETRIEVES > max(scores[:FOUND] + scores[FOUND + 1 :])
    rows = rows_of(make_prompt_cache(demo, 100))
    assert rows.index(max(rows)) == FOUND and sum(rows) <= 600
    assert min(rows) >= 60 and max(rows) > 200


def test_the_score_is_what_far_rows_give_the_second_copy(demo, monkeypatch):
    """By NumPy, of the keys and values of every layer, for the last 96 queries of each copy."""
    from mlx_lm.models import qwen3

    tokens = np.tile(np.random.default_rng(0).integers(0, demo.args.vocab_size, 192), 2)
    found = []

    def noted(queries, keys, values, *, cache, scale, mask):
        group = queries.shape[1] // keys.shape[1]
        q, k, v = (np.array(one, np.float64)[0] for one in (queries, keys, values))
        k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
        logits = q @ k.swapaxes(-1, -2) * scale
        query, key = np.arange(384)[:, None], np.arange(384)
        near = (key < 4) | (key > query - 64)
        outputs = [
            (weights / weights.sum(-1, keepdims=True)) @ v
            for seen in (key <= query, (key <= query) & near)
            for weights in [np.where(seen, np.exp(logits - logits.max(-1, keepdims=True)), 0)]
        ]
        moved = np.sqrt(((outputs[0] - outputs[1]) ** 2).sum((0, 2)))
        length = np.linalg.norm(v, axis=-1) * len(v) ** 0.5
        first, second = (
            moved[end - 96 : end].mean() / length[:, :end].mean() for end in (192, 384)
        )
        found.append(max(0, second - first))
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    monkeypatch.setattr(qwen3, "scaled_dot_product_attention", noted)
    mx.eval(demo(mx.array(tokens)[None]))
    monkeypatch.undo()
    np.testing.assert_allclose(probe(demo).scores, found, rtol=1e-3, atol=2e-4)


def test_a_model_is_probed_once_and_files_remember_it(demo, folder, monkeypatch):
    calls = []
    original = layers._scores
    monkeypatch.setattr(layers, "_scores", lambda *given: calls.append(1) or original(*given))
    first = probe(demo)
    again = mlx_h2o.load("demo")[0]  # another object of the same weights
    assert probe(demo) is first and probe(again) == first and len(calls) == 1
    (file,) = folder.iterdir()
    for text in ("", "[]", '{"format": 1}', '{"format": 0, "scores": {}}'):
        file.write_text(text)
        layers._known.clear()
        assert probe(demo) == first
    assert len(calls) == 5
    kept = json.loads(file.read_text())
    for wrong in ([0.1], ["a"] * 6, None, [7.0] * 6):
        file.write_text(json.dumps(kept | {"scores": dict.fromkeys(kept["scores"], wrong)}))
        layers._known.clear()
        assert probe(demo) == first
    assert len(calls) == 9


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc").is_dir(), reason="needs /proc")
def test_a_folder_that_cannot_be_written_is_no_error(demo, monkeypatch):
    monkeypatch.setenv("MLX_H2O_CACHE", "/proc/no/such/folder")
    assert len(probe(demo).scores) == 6


def test_a_probe_leaves_everything_as_it_was(demo):
    from mlx_lm.models import qwen3

    mx.random.seed(3)
    expected = np.array(mx.random.uniform(shape=(4,)))
    function = qwen3.scaled_dot_product_attention
    weights = {name: np.array(one) for name, one in tree_flatten(demo.parameters())}
    mx.random.seed(3)
    probe(demo)
    np.testing.assert_array_equal(np.array(mx.random.uniform(shape=(4,))), expected)
    assert qwen3.scaled_dot_product_attention is function
    for name, one in tree_flatten(demo.parameters()):
        np.testing.assert_array_equal(np.array(one), weights[name])


def test_a_model_without_retrieving_layers_has_equal_rows():
    model = tiny_qwen3(layers=8)
    assert 0 < max(probe(model).scores) < RETRIEVES
    assert rows_of(make_prompt_cache(model, 40)) == [40] * 8


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("plamo2", "does not call mlx_lm's attention"),
        ("gemma2", "does not call mlx_lm's attention"),
    ],
)
def test_models_that_hide_their_attention_have_equal_rows(name, reason):
    model = tiny.build(name)
    assert reason in probe(model).reason
    caches = make_prompt_cache(model, 40, policy="keydiff")
    assert {*rows_of(caches)} == {40}
    assert f"the same rows in every layer: the model {reason}" in str(summary(caches, model))


def test_a_summary_says_how_rows_are_shared_out(demo):
    caches = make_prompt_cache(demo, 100)
    assert "71 to 244 rows by layer" in str(summary(caches, demo))
    equal = str(summary(make_prompt_cache(demo, 100, layers="equal"), demo))
    assert "by layer" not in equal and "every layer" not in equal


def test_where_there_is_nothing_to_probe_for(demo, monkeypatch):
    def never(*_):
        raise AssertionError("probed")

    monkeypatch.setattr(layers, "_probed", never)
    assert rows_of(make_prompt_cache(demo, 40, layers="equal")) == [40] * 6
    assert rows_of(make_prompt_cache(demo, budgets=[40] * 6)) == [40] * 6
    assert rows_of(make_prompt_cache(demo, H2OConfig(max_kv_size=None))) == [None] * 6
    assert fit_bytes(demo, "300KB", layers="equal").config.max_kv_size > 40
    with pytest.raises(ValueError, match="layers is 'some', expected one of: probe, equal"):
        make_prompt_cache(demo, 40, layers="some")


@pytest.mark.parametrize(
    "given",
    [
        {"sink_size": 30},
        {"prefix_size": 50},
        {"heavy_size": 20, "recent_size": 20},
        {"kv_bits": 8, "light_bits": 4, "dense_size": 20},
        {"speculative": 20},
        {"kv_format": "turbo3", "turbo_guard": 1},
        {"evict_every": 7},
        {"policy": "h2o"},
    ],
)
def test_other_settings_hold_in_every_layer(demo, given):
    config = H2OConfig(max_kv_size=60, **given)
    caches = make_prompt_cache(demo, config)
    assert sum(rows_of(caches)) <= 360 and len({*rows_of(caches)}) == 2
    for cache in caches:
        assert cache.config.protected == config.protected
        assert cache.config.speculative == config.speculative
        assert cache.config.dense_rows == config.dense_rows
        assert cache.config.heavy_size / cache.config.max_kv_size <= 0.55
    text = mlx_h2o.load("demo")[1].encode("The ship was lost at sea. " * 20)[:150]
    with mlx_h2o.routing(demo):
        evaluate.prefill(demo, caches, text, chunk=48)
        evaluate.prefill(demo, caches, text[:4])
    for cache in caches:
        cache.flush()
        assert cache.size() <= cache.config.max_kv_size


def test_the_fewest_rows_that_settings_allow(demo):
    """Where the mean is hardly more than what they need, layers are nearly equal."""
    caches = make_prompt_cache(demo, 24, sink_size=20)
    assert min(rows_of(caches)) >= 21 and sum(rows_of(caches)) <= 144
    assert rows_of(make_prompt_cache(demo, 22, speculative=16)) == [22] * 6


def test_bytes_count_the_rows_of_every_layer(demo):
    found = fit_bytes(demo, "300KB", kv_bits=None)
    caches = make_prompt_cache(demo, found.config)
    tokens = mlx_h2o.load("demo")[1].encode("The ship was lost at sea. " * 60)[:300]
    evaluate.prefill(demo, caches, tokens)
    evaluate.prefill(demo, caches, tokens[:40], chunk=1)
    held = sum(cache.nbytes for cache in caches)
    assert found.nbytes <= 300_000 and held == found.nbytes
    equal = fit_bytes(demo, "300KB", kv_bits=None, layers="equal")
    assert 0.9 < found.config.max_kv_size / equal.config.max_kv_size <= 1.1


def test_a_draft_model_has_a_probe_of_its_own(demo):
    draft = tiny_qwen3()
    caches = make_prompt_cache(demo, 60, draft_model=draft, speculative=2)
    assert rows_of(caches[6:]) == [60, 60] and len({*rows_of(caches[:6])}) == 2


@pytest.mark.slow
def test_batches_are_their_sequences(demo):
    tokenizer = mlx_h2o.load("demo")[1]
    prompts = [tokenizer.encode("The ship was lost at sea. " * 9)[:length] for length in (70, 9)]
    given = {"max_kv_size": 32, "prefill_step_size": 16, "max_tokens": 24}
    found = mlx_h2o.batch_generate(demo, tokenizer, prompts, return_token_ids=True, **given)
    for prompt, tokens in zip(prompts, found.token_ids, strict=True):
        alone = mlx_h2o.stream_generate(demo, tokenizer, prompt, **given)
        assert tokens == [one.token for one in alone][: len(tokens)]


def test_the_command_writes_what_budgets_read(demo, tmp_path, capsys):
    file = tmp_path / "rows.json"
    flags = ["--model", "demo", "--max-kv-size", "100"]
    assert cli.main(["layers", *flags, "--output", str(file)]) == 0
    said = capsys.readouterr().out
    rows = json.loads(file.read_text())["budgets"]
    assert rows == rows_of(make_prompt_cache(demo, 100))
    assert f"layer   {FOUND}: {rows[FOUND]} rows" in said
    assert rows_of(make_prompt_cache(demo, budgets=file)) == rows
    assert cli.main(["layers", *flags[:2], "--max-kv-size", "none"]) == 2
    assert "--max-kv-size is none, expected a number of rows" in capsys.readouterr().err


def test_layers_that_grow_among_windows():
    """Only they are probed, and only they share rows."""
    model = tiny.build("gemma3")
    found = probe(model)
    caches = make_prompt_cache(model, 40)
    assert len(found.scores) == len(list(evicting_caches(caches))) < len(caches)


@pytest.mark.slow
def test_the_layers_of_a_real_model():
    """Those that single-layer losses name too."""
    models = Path(os.environ.get("MLX_H2O_MODELS") or Path("~/.cache/mlx-h2o/models").expanduser())
    folder = models / "smollm2-135m-instruct"
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"no model at {folder} (set MLX_H2O_MODELS)")
    model = mlx_h2o.load(str(folder))[0]
    scores = probe(model).scores
    best = sorted(range(30), key=lambda layer: -scores[layer])
    assert {*best[:4]} == {17, 18, 20, 23}
    rows = rows_of(make_prompt_cache(model, 128))
    assert sum(rows) <= 30 * 128 and min(rows) >= 76
    assert all(rows[layer] > 256 for layer in (17, 18, 20, 23))
