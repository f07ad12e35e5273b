"""Steps of a full cache: whose memory they write, and whose not."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from back_ends import NATIVE
from mlx_h2o import H2OConfig, H2OKVCache, fast, use_backend
from mlx_h2o.lm import attention


def address(array: mx.array) -> int:
    mx.eval(array)
    mx.synchronize()
    view = np.array(array, copy=False)
    return int(view.__array_interface__["data"][0])


@NATIVE
def test_importance_is_updated_in_place():
    with use_backend("native"):
        q, k = mx.ones((1, 2, 1, 8)), mx.ones((1, 1, 300, 8))
        importance = mx.ones((1, 1, 300)) + 0
        before = address(importance)
        for _ in range(3):
            _, importance = fast.attention_and_accumulate(q, k, k, importance, scale=1.0, decay=0.5)
            assert address(importance) == before
            scores = mx.ones((1, 2, 1, 300))
            importance = fast.accumulate_scores(importance, scores, decay=0.5)
            assert address(importance) == before


def cache_step(cache, token):
    """Update and attention as a routed model does them."""
    keys, values = cache.update_and_fetch(token, token)
    queries = mx.concatenate([token, token], axis=1)
    rows = queries, keys, values

    def stock():
        return mx.fast.scaled_dot_product_attention(*rows, scale=0.1)

    return attention.attend(stock, *rows, cache, scale=0.1)


def full_cache(policy, rows=64):
    rng = np.random.default_rng(11)
    cache = H2OKVCache(H2OConfig.of(max_kv_size=rows, policy=policy, evict_every=1))
    for _ in range(rows):
        mx.eval(cache_step(cache, mx.array(rng.standard_normal((1, 2, 1, 16)).astype(np.float32))))
    return cache, rng


@NATIVE
@pytest.mark.parametrize("policy", ["h2o", "window", "keydiff"])
def test_a_full_cache_stays_in_its_memory(policy):
    with use_backend("native"):
        cache, rng = full_cache(policy)
        addresses = set()
        for _ in range(10):
            mx.eval(cache_step(cache, mx.array(rng.random((1, 2, 1, 16)).astype(np.float32))))
            addresses.add((address(cache.keys), address(cache.values)))
        assert len(addresses) == 1
