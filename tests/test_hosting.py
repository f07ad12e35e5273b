"""Hosting: mlx_lm's own names for making caches make evicting ones, for a while."""

from __future__ import annotations

import gc
import importlib
import weakref
from dataclasses import replace

import mlx_lm.models.cache as mlx_lm_cache
import pytest
from mlx_lm.generate import BatchGenerator

from mlx_h2o import BatchH2OKVCache, H2OConfig, H2OKVCache, generate, make_prompt_cache
from mlx_h2o.lm.hosting import hosting
from routing_checks import SETTINGS, mlx_lm_stays_as_it_is, patched, qwen3
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer

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


@pytest.mark.parametrize("name", ["generate", "server"])
def test_the_names_of_mlx_lm(name):
    module = importlib.import_module(f"mlx_lm.{name}")
    model = tiny_qwen3()
    with hosting(CONFIG):
        caches = module.make_prompt_cache(model)
        expected = replace(CONFIG, context_size=model.args.max_position_embeddings)
        assert [cache.config for cache in caches] == [expected] * 2
    assert type(module.make_prompt_cache(model)[0]) is mlx_lm_cache.KVCache


def test_models_that_go_are_not_kept():
    server = importlib.import_module("mlx_lm.server")
    with hosting(CONFIG):
        model = tiny_qwen3()
        server.make_prompt_cache(model)
        known = weakref.ref(model)
        del model
        gc.collect()
        assert known() is None
        assert patched(qwen3)  # until the context closes


@pytest.mark.parametrize("speculative", [0, 2])
def test_the_servers_store_of_prompts(speculative):
    """Prefixes are found; what has evicted is never cut, what has not may be."""
    model, tokenizer = tiny_qwen3(), tiny_tokenizer()
    prompt = random_prompt(30)
    store = mlx_lm_cache.LRUPromptCache()

    def cached(count: int):
        caches = make_prompt_cache(model, 16, **SETTINGS, speculative=speculative)
        found = generate(model, tokenizer, prompt[:count], max_tokens=1, prompt_cache=caches)
        assert found
        return caches

    with hosting(CONFIG):
        long, short = cached(29), cached(9)
        store.insert_cache("model", prompt[:29], long)
        store.insert_cache("model", prompt[:9], short)
        assert len(store) == 2
        assert store.nbytes == sum(cache.nbytes for cache in (*long, *short))
        found, rest = store.fetch_nearest_cache("model", prompt)
        assert rest == prompt[29:]
        assert found[0] is not long[0]
        assert found[0].offset == long[0].offset
        found, rest = store.fetch_nearest_cache("model", prompt[:20])
        assert rest == prompt[9:20]  # not the long one, cut down
        found, rest = store.fetch_nearest_cache("model", prompt[:5])
        assert rest == prompt[4:5]
        assert found[0].offset == short[0].offset - 5
