"""H2OKVCache: which rows it keeps and returns, and when they go."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_checks import (
    check_lengths_after_replacements,
    check_ties,
    check_trace,
    exact_trace,
    filled,
    random_tokens,
    rows_by_position,
    small,
    step,
)
from mlx_h2o import H2OConfig, H2OKVCache, policies

POLICIES = policies.names()
EXACT = tuple(name for name in POLICIES if not policies.build(H2OConfig(policy=name)).needs_weights)
"""Policies whose ranks are exact for ``exact_trace``: no exponential, so ties are ties."""


class Compacting(H2OKVCache):
    """Never replaces in place: a row goes by compaction, as in the reference semantics."""

    def _append(self, store, keys, values):
        added = keys.shape[2]
        if added == 1 and store.length >= self._limit:
            self._compact(store, self.config.max_kv_size - 1, added)
            store.append(keys, values, self.offset, self._limit)
        else:
            super()._append(store, keys, values)


# What is kept


@pytest.mark.parametrize("policy", POLICIES)
def test_lengths_1_to_8_after_100_replacements_equal_the_reference(policy):
    check_lengths_after_replacements(H2OKVCache, policy)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    policy=st.sampled_from(EXACT),
    shared_heads=st.booleans(),
    evict_every=st.integers(1, 8),
    max_kv_size=st.integers(3, 8),
    seed=st.integers(0, 2**16),
)
def test_replacement_and_compaction_keep_the_same_rows(
    data, policy, shared_heads, evict_every, max_kv_size, seed
):
    sink_size = data.draw(st.integers(0, max_kv_size - 1), "sink_size")
    recent_size = data.draw(st.integers(0, max_kv_size - sink_size), "recent_size")
    lengths = data.draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, 3, 5]), min_size=1), "lengths")
    # At most 21 tokens: sums of halves stay exact in float32.
    while sum(lengths) > 21:
        lengths.pop()
    config = H2OConfig(
        max_kv_size=max_kv_size,
        sink_size=sink_size,
        heavy_size=max_kv_size - sink_size - recent_size,
        recent_size=recent_size,
        policy=policy,
        decay=0.5,
        evict_every=evict_every,
        shared_heads=shared_heads,
    )
    scores, keys = exact_trace(np.random.default_rng(seed), lengths)
    check_trace([H2OKVCache(config), Compacting(config)], config, lengths, scores, keys)


def test_ties_go_to_the_lower_position():
    check_ties(H2OKVCache)


@pytest.mark.parametrize("budget", [23, 24, 25])
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_goes_below_the_budget(policy, budget):
    rng = np.random.default_rng(0)
    cache = small(policy, max_kv_size=budget)
    for length in (20, 1, 1, 1, 1):
        step(cache, *random_tokens(rng, length))
    kept, _ = rows_by_position(cache)
    assert cache.evicted == max(0, 24 - budget)
    assert cache.size() == min(24, budget)
    if budget >= 24:
        assert all(positions == list(range(24)) for positions in kept.values())
        np.testing.assert_array_equal(np.array(cache.positions)[0, 0], np.arange(24))


@pytest.mark.parametrize("policy", POLICIES)
def test_sinks_and_recent_rows_stay(policy):
    cache, _ = filled(policy)
    for positions in rows_by_position(cache)[0].values():
        assert len(set(positions)) == cache.size() == 16
        assert {0, 1, 36, 37, 38, 39} <= set(positions)
    assert (cache.offset, cache.evicted) == (40, 24)


def test_window_keeps_sinks_and_the_newest():
    cache, _ = filled("window")
    for positions in rows_by_position(cache)[0].values():
        assert positions == [0, 1, *range(26, 40)]


def test_heads_choose_by_themselves():
    cache, _ = filled("h2o")
    kept = {tuple(positions) for positions in rows_by_position(cache)[0].values()}
    assert len(kept) == 4  # 2 sequences x 2 KV heads


@pytest.mark.parametrize("evict_every", [1, 2, 5, 8])
def test_evict_every_stores_as_many_rows_more(evict_every):
    rng = np.random.default_rng(3)
    cache = small("h2o", evict_every=evict_every)
    sizes = []
    for _ in range(60):
        step(cache, *random_tokens(rng, 1))
        sizes.append(cache.size())
    assert max(sizes) == 16 + evict_every - 1
    assert min(sizes[16:]) == 16
    # No room is made beyond that.
    assert cache.nbytes <= 2 * 2 * (16 + evict_every - 1) * (2 * 16 * 4 + 8)


@pytest.mark.parametrize("policy", POLICIES)
def test_chunked_prefill_holds_the_budget_and_one_chunk(policy):
    rng = np.random.default_rng(4)
    cache = small(policy)
    for length in (30, 7, 30, 1, 30, 2):
        _, keys, values = random_tokens(rng, length)
        k, v = cache.update_and_fetch(mx.array(keys), mx.array(values))
        assert k.shape[2] == v.shape[2] <= 16 + length
        if length > 1:  # the last rows, in order
            np.testing.assert_array_equal(np.array(k)[:, :, -length:], keys)
        cache.update_scores(mx.zeros((2, 4, length, k.shape[2])))
        assert cache.size() <= 16
    assert cache.offset == 100
    assert cache.nbytes == 2 * 2 * 16 * (2 * 16 * 4 + 8)


def test_the_surplus_stays_between_two_attentions_of_one_update():
    rng = np.random.default_rng(4)
    cache = small()
    _, keys, values = random_tokens(rng, 30)
    k, _ = cache.update_and_fetch(mx.array(keys), mx.array(values))
    cache.update_scores(mx.ones((2, 4, 30, 30)))
    again, _ = cache.keys_and_values()
    assert k.shape == again.shape
    cache.update_scores(mx.ones((2, 4, 30, 30)) * 3)
    assert cache.size() == 16


@pytest.mark.parametrize("read", ["size", "nbytes", "state", "copy"])
def test_the_surplus_goes_at_the_first_occasion(read):
    rng = np.random.default_rng(4)
    cache = small()
    step(cache, *random_tokens(rng, 30))
    assert cache.positions.shape[2] == 30
    assert not cache.is_trimmable()
    occasions = {
        "size": lambda: cache.size(),
        "nbytes": lambda: cache.nbytes,
        "state": lambda: cache.state,
        "copy": lambda: copy.deepcopy(cache),
    }
    occasions[read]()
    assert cache.positions.shape[2] == 16
    assert cache.evicted == 14


def test_only_the_last_128_queries_of_a_chunk_count():
    cache = small(max_kv_size=200)
    keys = mx.zeros((1, 1, 150, 4))
    cache.update_and_fetch(keys, keys)
    scores = mx.ones((1, 1, 150, 150))
    scores[:, :, :22] = 1e9
    cache.update_scores(scores)
    assert mx.allclose(cache.scores, mx.ones((1, 1, 150))).item()


# Logical and physical length


@pytest.mark.parametrize("policy", POLICIES)
def test_offset_grows_and_size_does_not(policy):
    cache, rng = filled(policy)
    assert (cache.offset, cache.size()) == (40, 16)
    step(cache, *random_tokens(rng, 3))
    assert (cache.offset, cache.size()) == (43, 16)


def test_masks_fit_what_the_update_returns():
    cache, rng = filled()
    assert cache.make_mask(1) is None
    assert cache.make_mask(1, return_array=True) is None
    assert cache.make_mask(4) == "causal"
    for length in (2, 30, 3):
        mask = cache.make_mask(length, return_array=True)
        keys = mx.array(random_tokens(rng, length)[1])
        stored, _ = cache.update_and_fetch(keys, keys)
        cache.update_scores(mx.ones((2, 2, length, stored.shape[2])))
        assert mask.shape == (length, stored.shape[2])
        assert mask.sum(axis=1).tolist() == [
            stored.shape[2] - length + i + 1 for i in range(length)
        ]


def test_a_window_is_refused():
    with pytest.raises(
        ValueError, match=r"\[H2OKVCache.make_mask\] window_size is 8.*tiny layer 0"
    ):
        small().make_mask(4, window_size=8)


# Scores that do not come


def test_an_update_without_scores_is_an_error_at_the_next():
    cache, rng = filled()
    keys = mx.array(random_tokens(rng, 1)[1])
    cache.update_and_fetch(keys, keys)
    with pytest.raises(RuntimeError, match=r"tiny layer 0 got no scores.*'h2o'.*routing"):
        cache.update_and_fetch(keys, keys)
    assert cache.offset == 41  # the second one did nothing


def test_a_chunk_without_scores_is_not_evicted_from():
    cache = small()
    keys = mx.zeros((1, 1, 30, 4))
    cache.update_and_fetch(keys, keys)
    with pytest.raises(RuntimeError, match="got no scores"):
        _ = cache.state
    assert cache.evicted == 0


@pytest.mark.parametrize("policy", ["window", "keydiff"])
def test_policies_that_need_no_scores_go_on(policy):
    cache = small(policy)
    keys = mx.random.normal((1, 1, 1, 4))
    for _ in range(20):
        cache.update_and_fetch(keys, keys)
    assert cache.evicted == 4
