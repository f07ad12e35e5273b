"""Eviction installed on a model: mlx_lm's own loop evicts until it is removed."""

from __future__ import annotations

import gc

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import mlx_h2o
from models import tiny
from routing_checks import mlx_lm_stays_as_it_is
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer

__all__ = ["mlx_lm_stays_as_it_is"]  # a fixture around every test

SIZES = {"n_sink": 2, "budget": 10, "n_recent": 8}


def generated(model, prompt):
    steps = mlx_lm.stream_generate(model, tiny_tokenizer(), prompt, max_tokens=30)
    return [response.token for response in steps]


@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny_qwen3, lambda: tiny.build("deepseek_v2")])
def test_plain_mlx_lm_evicts_and_then_does_not(build):
    model = build()
    tokens = mx.array([random_prompt(40)]) % 60
    plain = generated(model, tokens[0])
    mlx_h2o.install_kv_eviction(model, **SIZES)
    try:
        caches = mlx_lm_cache.make_prompt_cache(model)
        assert all(type(cache) is mlx_h2o.H2OKVCache for cache in caches)
        mx.eval(model(tokens, cache=caches))
        for cache in caches:
            cache.flush()
        assert {cache.size() for cache in caches} == {20}
        for _ in range(5):
            mx.eval(model(tokens[:, :1], cache=caches))
        assert {(cache.size(), cache.offset) for cache in caches} == {(20, 45)}
        assert len(generated(model, tokens[0])) == len(plain)
    finally:
        mlx_h2o.remove_kv_eviction(model)
    assert type(mlx_lm_cache.make_prompt_cache(model)[0]) is mlx_lm_cache.KVCache
    assert generated(model, tokens[0]) == plain


def test_the_published_policy_and_the_published_peak():
    """Accumulated attention; evict_every - 1 rows more between evictions."""
    model = tiny_qwen3()
    mlx_h2o.install_kv_eviction(model, evict_every=4, **SIZES)
    config = mlx_lm_cache.make_prompt_cache(model)[0].config
    mlx_h2o.remove_kv_eviction(model)
    budget = config.budget
    assert (config.policy.name, budget.evict_every) == ("h2o-sum", 4)
    assert (budget.max_kv_size, budget.sink_size, budget.recent_size) == (23, 2, 8)
    mlx_h2o.install_kv_eviction(model, policy="keydiff", **SIZES)
    config = mlx_lm_cache.make_prompt_cache(model)[0].config
    mlx_h2o.remove_kv_eviction(model)
    assert (config.policy.name, config.max_kv_size) == ("keydiff", 20)


def test_twice_and_never_are_refused():
    model = tiny_qwen3()
    with pytest.raises(ValueError, match=r"\[remove_kv_eviction\].*not installed"):
        mlx_h2o.remove_kv_eviction(model)
    mlx_h2o.install_kv_eviction(model, **SIZES)
    with pytest.raises(ValueError, match=r"\[install_kv_eviction\].*already"):
        mlx_h2o.install_kv_eviction(model, **SIZES)
    mlx_h2o.remove_kv_eviction(model)


def test_what_cannot_be_served_changes_nothing():
    model = tiny_qwen3()
    with pytest.raises(ValueError, match="policy"):
        mlx_h2o.install_kv_eviction(model, policy="best", **SIZES)
    assert type(mlx_lm_cache.make_prompt_cache(model)[0]) is mlx_lm_cache.KVCache


@pytest.mark.slow
def test_a_model_that_goes_takes_its_eviction_along():
    model = tiny.build("llama")
    mlx_h2o.install_kv_eviction(model, **SIZES)
    del model  # the fixture sees that mlx_lm is as it was

    gc.collect()


def test_reset_forgets_the_scores_and_keeps_the_rows():
    model = tiny_qwen3()
    caches = mlx_h2o.make_prompt_cache(model, 24, policy="h2o-ema")
    with mlx_h2o.routing(model):
        mx.eval(model(mx.array([random_prompt(40)]), cache=caches))
        rows = [np.array(cache.positions) for cache in caches]
        mlx_h2o.reset_eviction_scores(caches)
        for cache, before in zip(caches, rows, strict=True):
            assert np.isnan(np.array(cache.scores)).all()
            assert cache.size() == 24 and before.shape[2] >= 24
        mx.eval(model(mx.array([[1]]), cache=caches))
        assert all(np.isfinite(np.array(cache.scores)).all() for cache in caches)


def test_reset_without_an_evicting_cache_is_refused():
    with pytest.raises(ValueError, match=r"\[reset_eviction_scores\]"):
        mlx_h2o.reset_eviction_scores([mlx_lm_cache.KVCache()])
