"""H2OKVCache: buffers are written in place, and no graph grows."""

from __future__ import annotations

import gc
import weakref

import mlx.core as mx
import numpy as np
import pytest

from cache_checks import check_graph, random_tokens, small, step
from mlx_h2o import H2OConfig, H2OKVCache, policies

POLICIES = policies.names()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_cache_holds_no_view_of_its_rows(policy):
    """Only weak references to what was handed out, so that MLX may write in place."""
    rng = np.random.default_rng(1)
    cache = small(policy)
    for _ in range(20):
        step(cache, *random_tokens(rng, 1))
    _, keys, values = random_tokens(rng, 1)
    handed = cache.update_and_fetch(mx.array(keys), mx.array(values))
    gone = [weakref.ref(array) for array in handed]
    del handed
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize("policy", ["h2o", "window"])
def test_a_replacement_writes_in_place(policy):
    """No second copy of keys or values is made at the budget."""
    cache = H2OKVCache(H2OConfig(max_kv_size=1024, policy=policy))
    rows = mx.zeros((1, 2, 1024, 64))
    cache.update_and_fetch(rows, rows)
    cache.update_scores(mx.ones((1, 2, 1, 1024)))
    token, scores = mx.ones((1, 2, 1, 64)), mx.ones((1, 2, 1, 1024))
    for _ in range(3):
        _advance(cache, token, scores)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(20):
        _advance(cache, token, scores)
    one_buffer = rows.nbytes
    assert mx.get_peak_memory() - before < one_buffer / 2


def _advance(cache, token, scores):
    keys, values = cache.update_and_fetch(token, token)
    total = keys[0, 0, 0, 0] + values[0, 0, 0, 0]
    cache.update_scores(scores, masked=False)
    mx.eval(total, cache.scores)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [8, 400])
def test_no_graph_hangs_on_the_keys(policy, budget):
    check_graph(policy, budget=budget)
