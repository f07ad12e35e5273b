"""Replacement of the worst row: which one, what is written, and whose memory is used."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import reference
from mlx_h2o import H2OConfig, H2OKVCache, fast, use_backend
from mlx_h2o.lm import attention
from mlx_h2o.operations import native

BACKENDS = ["composed"] if native.unavailable_reason() else ["composed", "native"]
NATIVE = pytest.mark.skipif("native" not in BACKENDS, reason=native.unavailable_reason() or "here")


@pytest.fixture(params=BACKENDS)
def backend(request):
    with use_backend(request.param):
        yield request.param


class Rows:
    """Random rows of a cache, in NumPy."""

    def __init__(self, seed, *, batch=2, heads=3, rows=20, dtype=mx.float32, unscored=0.0):
        rng = np.random.default_rng(seed)
        shape = (batch, heads, rows)
        self.dtype = dtype
        self.keys = rng.standard_normal((*shape, 8)).astype(np.float32)
        self.values = rng.standard_normal((*shape, 5)).astype(np.float32)
        self.importance = rng.integers(0, 6, shape).astype(np.float32)  # with ties
        self.importance[rng.random(shape) < unscored] = np.nan
        self.positions = np.argsort(rng.random(shape), axis=2).astype(np.int32)
        self.new_keys = rng.standard_normal((batch, heads, 1, 8)).astype(np.float32)
        self.new_values = rng.standard_normal((batch, heads, 1, 5)).astype(np.float32)

    def arrays(self) -> list[mx.array]:
        k, v, nk, nv = (
            mx.array(a).astype(self.dtype)
            for a in (self.keys, self.values, self.new_keys, self.new_values)
        )
        return [k, v, mx.array(self.importance), mx.array(self.positions), nk, nv]

    def check(self, found, slots, position) -> None:
        k, v, importance, positions, nk, nv = (
            np.array(a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a)
            for a in self.arrays()
        )
        for head in np.ndindex(*slots.shape[:2]):
            slot = slots[head][0]
            k[head][slot], v[head][slot] = nk[head][0], nv[head][0]
            importance[head][slot], positions[head][slot] = np.nan, position
        for array, expected in zip(found, (k, v, importance, positions), strict=True):
            as_float = array.dtype in (mx.float16, mx.bfloat16)
            np.testing.assert_array_equal(
                np.array(array.astype(mx.float32) if as_float else array), expected
            )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("unscored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("zones", [{}, {"sink_size": 4, "recent_start": 15}, {"recent_start": 0}])
def test_the_worst_row_is_replaced(backend, dtype, unscored, zones):
    rows = Rows(1, dtype=dtype, unscored=unscored)
    found = fast.replace_worst(*rows.arrays(), position=20, **zones)
    slots = reference.evict_indices(rows.importance, rows.positions, **zones)
    rows.check(found, slots, 20)


def test_padding_goes_first(backend):
    rows = Rows(2)
    rows.positions[:, :, 5] = -1
    found = fast.replace_worst(*rows.arrays(), position=20, sink_size=2)
    rows.check(found, np.full((2, 3, 1), 5), 20)


def test_an_array_of_ranks_decides(backend):
    rows = Rows(3)
    ranks = np.random.default_rng(4).standard_normal(rows.importance.shape).astype(np.float32)
    for given in (mx.array(ranks), mx.array(np.repeat(ranks, 2, axis=2))[:, :, ::2]):
        found = fast.replace_worst(*rows.arrays(), position=99, sink_size=3, ranks=given)
        slots = reference.evict_indices(ranks, rows.positions, sink_size=3)
        rows.check(found, slots, 99)


def test_the_oldest_row_goes_by_age(backend):
    rows = Rows(5)
    rows.positions += 2**24  # beyond what float32 counts
    found = fast.replace_worst(*rows.arrays(), position=2**24 + 20, sink_size=1, ranks="age")
    rows.check(found, np.argmin(rows.positions, axis=2)[..., None], 2**24 + 20)


def test_the_least_diverse_key_goes(backend):
    rows = Rows(6)
    ranks = np.array(fast.key_diversity(mx.array(rows.keys)))
    found = fast.replace_worst(*rows.arrays(), position=20, sink_size=2, ranks="key_diversity")
    rows.check(found, reference.evict_indices(ranks, rows.positions, sink_size=2), 20)


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 1024])
def test_sizes_astride_boundaries(backend, rows):
    given = Rows(rows, rows=rows)
    found = fast.replace_worst(*given.arrays(), position=rows)
    given.check(found, reference.evict_indices(given.importance, given.positions), rows)


def test_rows_that_are_views_stay_what_they_are(backend):
    rows = Rows(7)
    stored = [mx.array(np.repeat(a, 2, axis=2))[:, :, ::2] for a in (rows.keys, rows.values)]
    turned = mx.array(np.swapaxes(rows.new_keys, 2, 3)).swapaxes(2, 3)
    _, _, importance, positions, _, new_values = rows.arrays()
    found = fast.replace_worst(
        *stored, importance, positions, turned, new_values, position=20, sink_size=1
    )
    rows.check(found, reference.evict_indices(rows.importance, rows.positions, sink_size=1), 20)
    np.testing.assert_array_equal(np.array(stored[0]), rows.keys)


def test_what_is_held_never_changes(backend):
    """The caller still has every array, so that none may be written."""
    rows = Rows(8)
    given = rows.arrays()
    mx.eval(given)
    for _ in range(3):
        mx.eval(fast.replace_worst(*given, position=20))
    for array, expected in zip(
        given, (rows.keys, rows.values, rows.importance, rows.positions), strict=False
    ):
        np.testing.assert_array_equal(np.array(array), expected)


def address(array: mx.array) -> int:
    mx.eval(array)
    mx.synchronize()
    view = np.array(array, copy=False)
    return int(view.__array_interface__["data"][0])


@NATIVE
@pytest.mark.parametrize("ranks", ["importance", "age", "key_diversity"])
def test_the_memory_of_inputs_that_nobody_holds_is_written_in_place(ranks):
    with use_backend("native"):
        k, v, c, p, new_k, new_v = (array + 0 for array in Rows(9, rows=300).arrays())
        before = [address(array) for array in (k, v, c, p)]
        for step in range(5):
            k, v, c, p = fast.replace_worst(
                k, v, c, p, new_k, new_v, position=300 + step, ranks=ranks
            )
            assert [address(array) for array in (k, v, c, p)] == before


@NATIVE
def test_an_input_that_is_held_is_copied_and_the_others_are_not():
    with use_backend("native"):
        k, v, c, p, new_k, new_v = (array + 0 for array in Rows(10, rows=300).arrays())
        before = [address(array) for array in (k, v, c, p)]
        held, content = k, np.array(k)
        k, v, c, p = fast.replace_worst(k, v, c, p, new_k, new_v, position=300)
        after = [address(array) for array in (k, v, c, p)]
        assert after[0] != before[0]
        assert after[1:] == before[1:]
        np.testing.assert_array_equal(np.array(held), content)


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
    cache = H2OKVCache(H2OConfig(max_kv_size=rows, policy=policy, evict_every=1))
    for _ in range(rows):
        mx.eval(cache_step(cache, mx.array(rng.standard_normal((1, 2, 1, 16)).astype(np.float32))))
    return cache, rng


@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff"])
def test_keys_that_somebody_holds_stay_for_ten_steps(backend, policy):
    cache, rng = full_cache(policy)
    held = [cache.keys, cache.values, cache.scores, cache.positions]
    before = [np.array(array) for array in held]
    for _ in range(10):
        token = mx.array(rng.standard_normal((1, 2, 1, 16)).astype(np.float32))
        mx.eval(cache_step(cache, token))
    assert cache.evicted == 10
    for array, expected in zip(held, before, strict=True):
        np.testing.assert_array_equal(np.array(array), expected)


@NATIVE
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff"])
def test_a_full_cache_stays_in_its_memory(policy):
    with use_backend("native"):
        cache, rng = full_cache(policy)
        addresses = set()
        for _ in range(10):
            mx.eval(cache_step(cache, mx.array(rng.random((1, 2, 1, 16)).astype(np.float32))))
            addresses.add((address(cache.keys), address(cache.values)))
        assert len(addresses) == 1
