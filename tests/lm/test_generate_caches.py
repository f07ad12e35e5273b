"""make_prompt_cache: which caches of a model evict, which models are refused, the summary."""

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache
import pytest

from mlx_h2o import H2OConfig, H2OKVCache, make_prompt_cache, routing
from mlx_h2o.lm.prompt_cache import summary
from tiny_models import random_prompt, tiny_qwen3


class Mixed:
    """A model with caches of all kinds, as hybrids have them."""

    model_type = "mixed"

    def __init__(self, *caches):
        self.caches = list(caches)

    def modules(self):
        return [self]

    def make_cache(self):
        return self.caches


def test_only_plain_kv_caches_are_replaced():
    class Own(mlx_lm_cache.KVCache):
        pass

    others = [
        mlx_lm_cache.RotatingKVCache(max_size=8),
        mlx_lm_cache.ArraysCache(2),
        mlx_lm_cache.ChunkedKVCache(8),
        Own(),
    ]
    pair = mlx_lm_cache.CacheList(mlx_lm_cache.ArraysCache(1), mlx_lm_cache.KVCache())
    made = make_prompt_cache(Mixed(mlx_lm_cache.KVCache(), *others, pair), 32)
    assert isinstance(made[0], H2OKVCache)
    assert made[1:5] == others
    assert isinstance(made[5][1], H2OKVCache)
    assert made[5][1].name == "mixed layer 5"
    assert isinstance(made[5][0], mlx_lm_cache.ArraysCache)


def test_a_model_without_kv_cache_is_refused():
    with pytest.raises(ValueError, match=r"\[make_prompt_cache\] mixed makes no plain KVCache"):
        make_prompt_cache(Mixed(mlx_lm_cache.ArraysCache(2)), 32)


@pytest.mark.parametrize("name", ["afm7", "phi3small", "minimax_m3_vl", "deepseek_v32"])
def test_models_that_cannot_be_served_are_refused_by_name(name):
    class Model(Mixed):
        model_type = name

    Model.__module__ = f"mlx_lm.models.{name}"
    said = rf"\[make_prompt_cache\] {name} cannot be served: its|the"
    with pytest.raises(ValueError, match=said):
        make_prompt_cache(Model(mlx_lm_cache.KVCache()), 32)


def test_settings_of_make_prompt_cache():
    model = tiny_qwen3()
    context = model.args.max_position_embeddings
    assert make_prompt_cache(model)[0].config == H2OConfig.of(context_size=context)
    config = H2OConfig.of(max_kv_size=40, policy="window", context_size=context)
    assert make_prompt_cache(model, config)[1].config is config
    assert make_prompt_cache(model, max_kv_size=40, policy="window")[1].config == config
    with pytest.raises(ValueError, match=r"found an H2OConfig and the settings \['policy'\]"):
        make_prompt_cache(model, config, policy="h2o-ema")
    with pytest.raises(ValueError, match=r"unknown settings \['budget'\], expected some of"):
        make_prompt_cache(model, budget=8)


def test_summary_counts_what_evicts():
    model = tiny_qwen3(layers=3)
    caches = [*make_prompt_cache(model, 16)[:2], mlx_lm_cache.KVCache()]
    with routing(model):
        mx.eval(model(mx.array(random_prompt(20))[None], cache=caches))
    nbytes = sum(cache.nbytes for cache in caches)
    assert summary(caches) == f"2 of 3 layers evict, 16 rows, 8 evicted, {nbytes:,} bytes"
