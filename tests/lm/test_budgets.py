"""Layers with different budgets: a list of them, a file, and the masks that they need."""

import contextlib
import copy
import functools

import mlx.core as mx
import mlx_lm.models.qwen3
import numpy as np
import pytest
from mlx_lm.models import base

import mlx_h2o
from mlx_h2o import H2OConfig
from mlx_h2o.lm.routing import evicting_caches, routing_for
from models import tiny
from readings import prefill
from tiny_models import random_prompt, tiny_qwen3


@pytest.mark.parametrize("policy", ["h2o-ema", "keydiff", "h2o-sum"])
def test_each_layer_keeps_its_own_budget(policy):
    model = tiny_qwen3()
    caches = mlx_h2o.make_prompt_cache(model, budgets=[12, 30], policy=policy, sink_size=2)
    prefill(model, caches, random_prompt(60), chunk=20)
    for cache in caches:
        cache.flush()
    assert [cache.size() for cache in caches] == [12, 30]
    prefill(model, caches, random_prompt(20, seed=4), chunk=7)
    assert [cache.keys.shape[2] for cache in copy.deepcopy(caches)] == [12, 30]
    again = mlx_h2o.make_prompt_cache(model, budgets=[12, 30], policy=policy, sink_size=2)
    prefill(model, again, random_prompt(60), chunk=20)
    # The first layer keeps what it keeps where all layers have its budget.
    alike = mlx_h2o.make_prompt_cache(model, 12, policy=policy, sink_size=2)
    prefill(model, alike, random_prompt(60), chunk=20)
    np.testing.assert_array_equal(np.array(again[0].positions), np.array(alike[0].positions))


LENGTHS = (30, 3, 17)


# Latent attention makes an array of the mask before attention, gemma2 its own softmax.
@pytest.mark.matrix(1)
@pytest.mark.parametrize(("name", "policy"), [
    ("deepseek_v3", "h2o"), ("deepseek_v3", "keydiff"), ("kimi_linear", "h2o-ema"),
    ("longcat_flash", "h2o"), ("qwen3", "h2o"), ("gemma3", "h2o-ema"),
])  # fmt: skip
def test_models_that_share_a_mask_read_each_layers_own(name, policy):
    """Chunks and batches: every layer's attention is over its own rows."""
    model = tiny.build(name)
    count = len(list(evicting_caches(mlx_h2o.make_prompt_cache(model, 16, policy="window"))))
    given = {"budgets": [12 + 7 * (layer % 3) for layer in range(count)], "policy": policy}
    the_batch_is_its_sequences(model, LENGTHS, **given)


@pytest.mark.parametrize(
    ("sequences", "given"),
    [
        (2, {}),  # as many as KV heads, which a mask would take them for
        (3, {"budgets": [12, 19, 26, 15]}),
        (2, {"budgets": [12, 19, 26, 15], "kv_bits": 4, "kv_group_size": 32}),
    ],
)
def test_gemma2_reads_the_masks_of_batches(sequences, given):
    """Its softmax has an axis of the query heads of each KV head, and takes no routing."""
    the_batch_is_its_sequences(tiny.build("gemma2"), LENGTHS[:sequences], **given)


def the_batch_is_its_sequences(model, lengths, **given):
    alone = [mlx_h2o.make_prompt_cache(model, 32, **given) for _ in lengths]
    with routing_for(model, list(evicting_caches(alone[0]))):
        for caches, length in zip(alone, lengths, strict=True):
            for start in range(0, length, 8):
                tokens = mx.arange(start, min(length, start + 8))[None] % 90 + 1
                mx.eval(model(tokens, cache=caches))
        batch = [one[0].merge(list(one)) for one in zip(*copy.deepcopy(alone), strict=True)]
        for step in range(12):
            tokens = mx.array([[5 + step], [9 + step], [30 + step]])[: len(lengths)]
            found = model(tokens, cache=batch)
            for line, caches in enumerate(alone):
                expected = model(tokens[line : line + 1], cache=caches)
                np.testing.assert_allclose(
                    np.array(found[line : line + 1]), np.array(expected), rtol=2e-3, atol=2e-4
                )


def test_an_array_that_a_model_asks_for_is_the_causal_mask(monkeypatch):
    """With arrays for each layer, a model answers as without, in chunks that evict."""
    model = tiny_qwen3()
    runs = []
    for array in (False, True):
        if array:
            monkeypatch.setattr(
                mlx_lm.models.qwen3,
                "create_attention_mask",
                functools.partial(base.create_attention_mask, return_array=True),
            )
        caches = mlx_h2o.make_prompt_cache(model, budgets=[12, 30], policy="keydiff")
        logits = [prefill(model, caches, random_prompt(60), chunk=9)]
        logits.append(prefill(model, caches, random_prompt(60, seed=9), chunk=16))
        runs.append(np.array(mx.stack(logits)))
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-4, atol=1e-5)


def test_one_budget_has_one_mask_and_unequal_ones_each_layers():
    model = tiny_qwen3()
    unequal = mlx_h2o.make_prompt_cache(model, budgets=[12, 30])
    assert unequal[0].make_mask(5) == "causal"
    assert unequal[0].make_mask(1, return_array=True) is None
    shared = unequal[0].make_mask(5, return_array=True)
    for cache in unequal:
        cache.update_and_fetch(*[mx.zeros((1, 2, 11, 16))] * 2)
        assert mx.where(shared, 1, 0).shape == (11, 11)
    np.testing.assert_array_equal(np.array(mx.where(shared, 1, 0)), np.tri(11))
    batch = unequal[0].merge(unequal[:1])
    assert batch.needs_routing and not unequal[0].needs_routing
    other = copy.deepcopy(batch)
    assert type(batch).from_state(batch.state).unequal_budgets
    batch.extend(other)
    assert batch.extract(1).unequal_budgets
    # The sizes of the windows differ, so rows leave at other times.
    recents = [H2OConfig.of(max_kv_size=30, heavy_size=h) for h in (5, 10)]
    assert all(c.unequal_budgets for c in mlx_h2o.make_prompt_cache(model, budgets=recents))
    equal = mlx_h2o.make_prompt_cache(model, budgets=[30, 30])
    assert equal[0].make_mask(5, return_array=True).shape == (5, 5)


def test_a_batch_of_unequal_budgets_that_is_not_routed_is_refused():
    model = tiny_qwen3()
    batch = [cache.merge([cache]) for cache in mlx_h2o.make_prompt_cache(model, budgets=[12, 30])]
    with pytest.raises(ValueError, match=r"qwen3 layer 0 .*unequal budgets.*routing\(model\)"):
        model(mx.array([[1]]), cache=batch)
    with mlx_h2o.routing(model):
        mx.eval(model(mx.array([[1]]), cache=batch))
    assert not hasattr(batch[0], "bits")


def test_a_model_that_takes_one_mask_for_all_layers():
    """Its own attention is MLX's, which no routing reaches: unequal budgets for one text only."""
    model = tiny.build("plamo2")
    for budgets, unequal in (([12, 19], True), ([12, 12], False)):
        caches = mlx_h2o.make_prompt_cache(model, budgets=budgets, policy="keydiff")
        mx.eval(model(mx.arange(1, 30)[None], cache=caches))
        cache = next(evicting_caches(caches))
        if unequal:
            with pytest.raises(ValueError, match="plamo2 layer .* one mask for all layers"):
                cache.merge([cache])
        else:
            assert cache.merge([cache]).size() == 12


def test_packed_rows_of_a_batch_are_read_outside_of_routing():
    """By mlx_lm's own attention, which is told of their bits as it is for one text."""
    model = tiny_qwen3(head_dim=32)
    found = []
    given = {"kv_bits": 8, "kv_group_size": 32, "kv_frame": False}
    for context in (mlx_h2o.routing(model), contextlib.nullcontext()):
        alone = [mlx_h2o.make_prompt_cache(model, 16, **given) for _ in "ab"]
        for caches, length in zip(alone, (20, 5), strict=True):
            prefill(model, caches, random_prompt(length), chunk=16)
        batch = [one[0].merge(list(one)) for one in zip(*alone, strict=True)]
        with context:
            found.append(np.array(model(mx.array([[1], [2]]), cache=batch)))
    np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("budgets", "text"),
    [
        ([12], "found 1 budgets, expected one for each of the 2 layers"),
        ([12, "a"], "a budget is 'a', expected an int"),
        ([12, True], "a budget is True, expected an int"),
        ([12, 4], "a budget is 4, sink_size is 4, expected fewer than max_kv_size = 4"),
        ([12, [12, 12, 12]], "budgets.1. is of 3 KV heads, expected 2 as qwen3 has"),
        ([[12], 12], "budgets.0. is of 1 KV heads, expected 2 as qwen3 has"),
        ([12, H2OConfig.of(kv_bits=8)], "a budget has kv_bits 8, expected None"),
        ("{", "file', expected a JSON file: Expecting"),
        ("[1, 2]", "holds list, expected an object with a list under"),
        ('{"budgets": [12, {"rows": 3}]}', "a budget is {'rows': 3}"),
    ],
)
def test_wrong_budgets_say_what_was_found(budgets, text, tmp_path):
    """In a list, or in a file of this text."""
    if isinstance(budgets, str):
        (tmp_path / "file").write_text(budgets)
        budgets = tmp_path / "file"
    with pytest.raises(ValueError, match=text):
        mlx_h2o.make_prompt_cache(tiny_qwen3(), budgets=budgets)
