"""A profile of the layers, budgets made of it, and layers that have their own."""

from __future__ import annotations

import copy
import json

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from mlx_h2o import H2OConfig, cli, demo, evaluate
from mlx_h2o.lm.profiling import LayerProfile, Profile
from tiny_models import random_prompt, stock_tokens, tiny_qwen3


def profile_of(*layers: tuple[float, float]) -> Profile:
    """Layers by (entropy, concentration)."""
    return Profile("tiny", 10, tuple(LayerProfile(h, c, 1.0) for h, c in layers))


def test_the_formula_of_the_paper():
    """clip(0.5 + (ratio - 1) * 2.5, 0.3, 0.7) of what the sinks leave; the budget stays."""
    config = H2OConfig(max_kv_size=256)
    found = profile_of((1, 0.25), (1, 0.30), (1, 0.33), (1, 0.32)).by_concentration(config)
    assert [c.heavy_size for c in found] == [round(share * 252) for share in (0.3, 0.5, 0.7, 2 / 3)]
    assert all(c.max_kv_size == 256 and c.sink_size == 4 for c in found)
    assert all(c.sink_size + c.heavy_size + c.recent_size == 256 for c in found)


@pytest.mark.parametrize("rows", [None, 20, 21, 97, 256, 1000])
def test_a_shared_budget_is_met_exactly(rows):
    config = H2OConfig(max_kv_size=64)
    found = profile_of((3.8, 0.3), (3.0, 0.3), (1.3, 0.3), (0.8, 0.3)).by_entropy(config, rows)
    budgets = [c.max_kv_size for c in found]
    assert sum(budgets) == (256 if rows is None else rows)
    assert budgets == sorted(budgets, reverse=True)
    assert min(budgets) > config.sink_size
    if rows is None:  # at least half and at most one and a half of an equal share, about
        assert budgets[0] > 85 and 32 < budgets[-1] < 43


def test_a_shared_budget_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match=r"\[Profile.by_entropy\] rows is 9 for 2 layers"):
        profile_of((1, 1), (1, 1)).by_entropy(H2OConfig(), 9)


def test_a_profile_needs_a_budget_to_share_out():
    unbounded = H2OConfig(max_kv_size=None)
    for way in ("by_entropy", "by_concentration"):
        with pytest.raises(ValueError, match=rf"\[Profile.{way}\] max_kv_size is None"):
            getattr(profile_of((1, 1), (1, 1)), way)(unbounded)
    found = profile_of((1, 1), (1, 1)).by_entropy(unbounded, 64)
    assert found == [H2OConfig(max_kv_size=32)] * 2


def test_the_profile_is_what_numpy_makes_of_the_scores(monkeypatch):
    """Every watched step of every layer, from the scores that attention returned."""
    model = tiny_qwen3()
    seen = []
    original = mlx_h2o.H2OKVCache.update_scores

    def watched(self, scores, **given):
        seen.append(np.array(scores, np.float64))
        return original(self, scores, **given)

    monkeypatch.setattr(mlx_h2o.H2OKVCache, "update_scores", watched)
    found = mlx_h2o.profile(model, [random_prompt(70), random_prompt(66, seed=2)], prompt=50)
    assert (found.model, found.steps, len(found.layers)) == ("qwen3", 36, 2)
    seen = [scores for scores in seen if scores.shape[2] == 1]
    assert len(seen) == 72
    for layer, profile in enumerate(found.layers):
        figures = []
        for scores in seen[layer::2]:
            weights = np.exp(scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True))
            sizes = np.sort(np.abs(scores), axis=-1)
            figures.append(
                [
                    -(weights * np.log(weights)).sum(-1).mean(),
                    (sizes[..., -32:].sum(-1) / sizes.sum(-1)).mean(),
                    scores.var(axis=-1).mean(),
                ]
            )
        expected = np.mean(figures, axis=0)
        np.testing.assert_allclose(
            [profile.entropy, profile.concentration, profile.variance], expected, rtol=1e-4
        )


def test_profiles_are_refused_texts_that_are_too_short():
    with pytest.raises(ValueError, match=r"\[profile\] found 1 texts, of lengths \[64\]"):
        mlx_h2o.profile(tiny_qwen3(), [random_prompt(64)])
    with pytest.raises(ValueError, match=r"\[profile\] found 0 texts"):
        mlx_h2o.profile(tiny_qwen3(), [])
    with pytest.raises(ValueError, match=r"\[profile\] prompt is 31"):
        mlx_h2o.profile(tiny_qwen3(), [random_prompt(64)], prompt=31)


@pytest.mark.parametrize("policy", ["h2o", "keydiff", "h2o-sum"])
def test_each_layer_keeps_its_own_budget(policy):
    model = tiny_qwen3()
    caches = mlx_h2o.make_prompt_cache(model, budgets=[12, 30], policy=policy, sink_size=2)
    evaluate.prefill(model, caches, random_prompt(60), chunk=20)
    for cache in caches:
        cache.flush()
    assert [cache.size() for cache in caches] == [12, 30]
    evaluate.prefill(model, caches, random_prompt(20, seed=4), chunk=7)
    assert [cache.keys.shape[2] for cache in copy.deepcopy(caches)] == [12, 30]
    again = mlx_h2o.make_prompt_cache(model, budgets=[12, 30], policy=policy, sink_size=2)
    evaluate.prefill(model, again, random_prompt(60), chunk=20)
    # The first layer keeps what it keeps where all layers have its budget.
    alike = mlx_h2o.make_prompt_cache(model, 12, policy=policy, sink_size=2)
    evaluate.prefill(model, alike, random_prompt(60), chunk=20)
    np.testing.assert_array_equal(np.array(again[0].positions), np.array(alike[0].positions))


def test_budgets_that_hold_everything_generate_as_stock_does():
    model = tiny_qwen3()
    prompt = random_prompt(40)
    caches = mlx_h2o.make_prompt_cache(model, budgets=[80, 100])
    tokens = []
    logits = evaluate.prefill(model, caches, prompt, chunk=16)
    for _ in range(10):
        tokens.append(int(mx.argmax(logits).item()))
        logits = evaluate.prefill(model, caches, tokens[-1:])
    assert tokens == stock_tokens(model, prompt, 10)


def test_one_array_mask_for_all_layers_refuses_unequal_budgets():
    model = tiny_qwen3()
    unequal = mlx_h2o.make_prompt_cache(model, budgets=[12, 30])
    with pytest.raises(ValueError, match="qwen3 layer 0 is asked for an array mask"):
        unequal[0].make_mask(5, return_array=True)
    with pytest.raises(ValueError, match="is asked for an array mask"):
        copy.deepcopy(unequal)[1].make_mask(5, return_array=True)
    assert unequal[0].make_mask(5) == "causal"
    assert unequal[0].make_mask(1, return_array=True) is None
    with pytest.raises(ValueError, match="unequal budgets, expected one budget: a batch"):
        unequal[0].merge([unequal[0]])
    equal = mlx_h2o.make_prompt_cache(
        model, budgets=[H2OConfig(max_kv_size=30, heavy_size=h) for h in (5, 10)]
    )
    assert equal[0].make_mask(5, return_array=True).shape == (5, 5)
    assert [cache.config.heavy_size for cache in equal] == [5, 10]


@pytest.mark.parametrize(
    ("budgets", "text"),
    [
        ([12], "found 1 budgets, expected one for each of the 2 layers"),
        ([12, "a"], "a budget is 'a', expected an int"),
        ([12, True], "a budget is True, expected an int"),
        ([12, 4], r"\[H2OConfig\] sink_size is 4, expected fewer than max_kv_size = 4"),
        ([12, H2OConfig(kv_bits=8)], "a budget has kv_bits 8, expected None"),
    ],
)
def test_wrong_budgets_say_what_was_found(budgets, text):
    with pytest.raises(ValueError, match=text):
        mlx_h2o.make_prompt_cache(tiny_qwen3(), budgets=budgets)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "holds list, expected an object with a list of budgets"),
        ('{"budgets": [{"max_kv_size": 12}, {"rows": 3}]}', "a budget is {'rows': 3}"),
    ],
)
def test_a_file_that_holds_no_budgets_is_refused(tmp_path, content, text):
    (tmp_path / "file").write_text(content)
    with pytest.raises(ValueError, match=text):
        mlx_h2o.make_prompt_cache(tiny_qwen3(), budgets=tmp_path / "file")


def test_a_file_that_holds_no_profile_is_refused(tmp_path):
    for content in ("{", "{}", '{"model": "a", "steps": 1, "layers": [{"entropy": 1}]}'):
        (tmp_path / "file").write_text(content)
        with pytest.raises(ValueError, match=r"^\[Profile.load\]"):
            Profile.load(tmp_path / "file")


def test_the_command_profiles_and_the_file_serves(tmp_path, capsys):
    text, file = tmp_path / "text", tmp_path / "profile.json"
    text.write_text(demo.text()[:1500])
    given = ["--model", "demo", "--text", str(text), "--json", str(file)]
    assert cli.main(["profile", *given, "--tokens", "120", "--max-kv-size", "40"]) == 0
    assert "layer  entropy" in capsys.readouterr().out
    sizes = [budget["max_kv_size"] for budget in json.loads(file.read_text())["budgets"]]
    assert sum(sizes) == 6 * 40 and len(set(sizes)) > 1
    assert len(Profile.load(file).layers) == 6
    model, _ = mlx_h2o.load("demo")
    caches = mlx_h2o.make_prompt_cache(model, budgets=file)
    assert [cache.config.max_kv_size for cache in caches] == sizes
    prompt = ["--model", "demo", "--prompt", "The ship was", "--max-tokens", "3"]
    assert cli.main(["generate", *prompt, "--budgets", str(file)]) == 0
    assert cli.main(["profile", *given[:4], "--json", str(file), "--tokens", "30"]) == 1
    assert "[profile] found 1 texts" in capsys.readouterr().err
