"""Rows that follow another cache's decisions, and the models whose layers need them."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_h2o
from mlx_h2o import H2OConfig, LinkedH2OCache
from models import tiny
from sizes import examples


def rows(positions: list[int], width: int, salt: float) -> mx.array:
    """One head; every row tells its position."""
    array = np.array(positions, np.float32)[None, None, :, None] + salt
    return mx.array(np.broadcast_to(array, (1, 1, len(positions), width)))


def step(cache: LinkedH2OCache, count: int, random: np.random.Generator):
    start = cache.offset
    new = list(range(start, start + count))
    cache[0].update_and_fetch(rows(new, 8, 0.25), rows(new, 4, 0.5))
    keys, values = cache[1].update_and_fetch(rows(new, 16, 0.125), rows(new, 2, 0.75))
    leading = np.array(cache[0].positions)
    np.testing.assert_array_equal(np.array(keys)[..., 3], leading + 0.125)
    np.testing.assert_array_equal(np.array(values)[..., 1], leading + 0.75)
    scores = random.standard_normal((1, 2, count, leading.shape[2])).astype(np.float32)
    cache[0].update_scores(mx.array(scores))


@pytest.mark.examples
@settings(max_examples=examples(40), deadline=None)
@given(
    steps=st.lists(st.sampled_from([1, 1, 1, 2, 5, 9]), min_size=1, max_size=40),
    evict_every=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**16),
)
def test_every_row_lies_in_the_leaders_slot(steps, evict_every, seed):
    config = H2OConfig(max_kv_size=8, sink_size=1, recent_size=3, evict_every=evict_every)
    cache = LinkedH2OCache(config, name="test layer 0")
    random = np.random.default_rng(seed)
    for index, count in enumerate(steps):
        step(cache, count, random)
        if index % 5 == 4:
            assert cache.size() <= 8 + evict_every - 1
            np.testing.assert_array_equal(
                np.array(cache[1].keys)[0, 0, :, 0], np.array(cache[0].positions)[0, 0] + 0.125
            )


def test_states_and_copies_go_on_alike():
    random = np.random.default_rng(0)
    cache = LinkedH2OCache(H2OConfig(max_kv_size=6, sink_size=1))
    for count in (4, 3, 1, 1):
        step(cache, count, random)
    for other in (copy.deepcopy(cache), LinkedH2OCache.from_state(cache.state)):
        assert other.offset == cache.offset
        assert other.nbytes == cache.nbytes > 0
        step(other, 1, np.random.default_rng(1))
        step(other, 3, np.random.default_rng(1))


def test_trim_takes_back_the_rows_of_both():
    random = np.random.default_rng(0)
    cache = LinkedH2OCache(H2OConfig(max_kv_size=16))
    step(cache, 7, random)
    assert cache.trim(3) == 3
    assert cache[1].keys.shape[2] == cache.offset == 4
    step(cache, 2, random)


def test_a_follower_that_goes_first_is_refused():
    cache = LinkedH2OCache(H2OConfig(max_kv_size=8))
    with pytest.raises(RuntimeError, match=r"\[FollowingRows.update_and_fetch\].*follow"):
        cache[1].update_and_fetch(rows([0], 8, 0), rows([0], 8, 0))


def test_rows_that_do_not_fit_are_refused():
    cache = LinkedH2OCache(H2OConfig(max_kv_size=8, policy="window"))
    cache[0].update_and_fetch(rows([0], 8, 0), rows([0], 8, 0))
    cache[1].update_and_fetch(rows([0], 8, 0), rows([0], 8, 0))
    cache[0].update_and_fetch(rows([1], 8, 0), rows([1], 8, 0))
    with pytest.raises(ValueError, match="row size 9, expected .* row size 8"):
        cache[1].update_and_fetch(rows([1], 9, 0), rows([1], 8, 0))
    with pytest.raises(ValueError, match="keys"):
        cache[1].keys = rows([1, 2, 3], 8, 0)


def test_an_indexed_model_evicts_while_its_indexer_picks():
    # A chunk brings more rows than the indexer picks, so that it does pick by slot.
    model = tiny.build("deepseek_v32", index_topk=24)
    caches = mlx_h2o.make_prompt_cache(model, 20)
    tokens = mx.arange(60)[None] % 90 + 1
    with mlx_h2o.routing(model):
        for part in (slice(0, 16), slice(16, 40), *(slice(i, i + 1) for i in range(40, 60))):
            logits = model(tokens[:, part], cache=caches)
            mx.eval(logits)
            assert mx.all(mx.isfinite(logits)).item()
    for cache in caches:
        assert cache.size() <= 20
        assert cache[1].keys.shape[2] == cache.size()
        np.testing.assert_array_equal(np.array(cache[1].positions), np.array(cache[0].positions))


def test_a_budget_beyond_what_the_indexer_picks_is_refused():
    model = tiny.build("deepseek_v32", index_topk=24)
    with pytest.raises(ValueError, match="24 rows by an indexer: found .* = 25"):
        mlx_h2o.make_prompt_cache(model, 25)


@pytest.mark.parametrize("settings", [{}, {"kv_bits": 8, "kv_group_size": 32}])
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v3", "phi"])
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
