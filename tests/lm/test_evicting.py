"""Eviction for programs that make no caches: mlx_lm's own loop evicts while a context is open."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import mlx_h2o
from models import tiny
from routing_checks import mlx_lm_stays_as_it_is
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer

__all__ = ["mlx_lm_stays_as_it_is"]  # a fixture around every test


@pytest.mark.parametrize(
    "build", [tiny_qwen3, pytest.param(lambda: tiny.build("deepseek_v2"), marks=pytest.mark.slow)]
)
def test_plain_mlx_lm_evicts_and_then_does_not(build):
    model = build()
    tokens = mx.array([random_prompt(40)]) % 60

    def generated():
        steps = mlx_lm.stream_generate(model, tiny_tokenizer(), tokens[0], max_tokens=30)
        return [response.token for response in steps]

    plain = generated()
    with mlx_h2o.evicting(model, max_kv_size=20, sink_size=2, policy="h2o-sum"):
        caches = mlx_lm_cache.make_prompt_cache(model)
        assert all(type(cache) is mlx_h2o.H2OKVCache for cache in caches)
        assert caches[0].config.policy.name == "h2o-sum"
        mx.eval(model(tokens, cache=caches))
        for cache in caches:
            cache.flush()
        assert {cache.size() for cache in caches} == {20}
        assert {cache.size() for cache in mlx_lm_cache.make_prompt_cache(model)} == {0}
        assert len(generated()) == len(plain)
        with pytest.raises(ValueError, match="no plain KVCache"), mlx_h2o.evicting(model):
            pass
    assert type(mlx_lm_cache.make_prompt_cache(model)[0]) is mlx_lm_cache.KVCache
    assert generated() == plain


def test_what_cannot_be_served_changes_nothing():
    model = tiny_qwen3()
    with pytest.raises(ValueError, match="policy"), mlx_h2o.evicting(model, policy="best"):
        pass
    assert type(mlx_lm_cache.make_prompt_cache(model)[0]) is mlx_lm_cache.KVCache
