"""Caches of latent attention, and of models that compute with the keys."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from models import tiny


@pytest.mark.parametrize("settings", [{}, {"kv_bits": 8, "kv_group_size": 32}])
@pytest.mark.parametrize("name", ["deepseek_v3", "phi"])
def test_a_saved_cache_of_any_form_goes_on_alike(tmp_path, name, settings):
    model = tiny.build(name, num_hidden_layers=2)
    caches = mlx_h2o.make_prompt_cache(model, 20, **settings)
    tokens = mx.arange(40)[None] % 90 + 1
    with mlx_h2o.routing(model):
        for part in (slice(0, 30), *(slice(i, i + 1) for i in range(30, 36))):
            mx.eval(model(tokens[:, part], cache=caches))
        file = tmp_path / "cache.safetensors"
        mlx_h2o.save_prompt_cache(file, caches, model=model)
        loaded = mlx_h2o.load_prompt_cache(file, model=model)
        assert [type(cache) for cache in loaded] == [type(cache) for cache in caches]
        for step in range(36, 40):
            one, other = (model(tokens[:, step : step + 1], cache=c) for c in (caches, loaded))
            np.testing.assert_array_equal(np.array(one), np.array(other))
        assert sum(c.nbytes for c in loaded) == sum(c.nbytes for c in caches)


def test_latents_are_packed_and_rotary_parts_are_not():
    model = tiny.build("deepseek_v3", num_hidden_layers=1)
    (cache,) = mlx_h2o.make_prompt_cache(model, 20, kv_bits=4, kv_group_size=32)
    with mlx_h2o.routing(model):
        mx.eval(model(mx.arange(12)[None], cache=[cache]))
    words, scales, _ = cache.keys
    assert (words.dtype, words.shape[-1]) == (mx.uint32, 64 * 4 // 32)
    assert scales.shape[-1] == 64 // 32
    assert (cache.values.dtype, cache.values.shape[-1]) == (mx.float32, 32)
