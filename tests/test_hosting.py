"""Hosting: mlx_lm's own names for making caches make evicting ones, for a while."""

from __future__ import annotations

import gc
import importlib
import weakref
from dataclasses import replace

import mlx_lm.models.cache as mlx_lm_cache
import pytest
from mlx_lm.generate import BatchGenerator

from mlx_h2o import BatchH2OKVCache, H2OConfig, H2OKVCache
from mlx_h2o.lm.hosting import hosting
from routing_checks import SETTINGS, mlx_lm_stays_as_it_is, patched, qwen3
from tiny_models import random_prompt, tiny_qwen3

__all__ = ["mlx_lm_stays_as_it_is"]  # a fixture around every test

pytestmark = pytest.mark.downstream

CONFIG = H2OConfig(max_kv_size=16, **SETTINGS)


def test_batches_make_their_own_evicting_caches():
    model = tiny_qwen3()
    with hosting(CONFIG):
        batches = BatchGenerator(model, prefill_step_size=8)
        batches.insert([random_prompt(30), random_prompt(7)], [6, 9])
        ended = []
        while len(ended) < 2:
            held = batches._generation_batch.prompt_cache
            assert all(type(cache) is BatchH2OKVCache for cache in held)
            ended += [r for r in batches.next()[1] if r.finish_reason]
        batches.close()
        assert patched(qwen3)
    assert not patched(qwen3)
    assert [type(cache) for r in ended for cache in r.prompt_cache] == [H2OKVCache] * 4


@pytest.mark.parametrize("name", ["generate", "chat", "cache_prompt"])
def test_the_names_of_mlx_lm(name):
    module = importlib.import_module(f"mlx_lm.{name}")
    model = tiny_qwen3()
    with hosting(CONFIG):
        caches = module.make_prompt_cache(model)
        expected = replace(CONFIG, context_size=model.args.max_position_embeddings)
        assert [cache.config for cache in caches] == [expected] * 2
    assert type(module.make_prompt_cache(model)[0]) is mlx_lm_cache.KVCache


def test_models_that_go_are_not_kept():
    chat = importlib.import_module("mlx_lm.chat")
    with hosting(CONFIG):
        model = tiny_qwen3()
        chat.make_prompt_cache(model)
        known = weakref.ref(model)
        del model
        gc.collect()
        assert known() is None
        assert patched(qwen3)  # until the context closes
