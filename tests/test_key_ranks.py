"""keydiff's ranks in the pass of attention: the rows are those of a second read of the keys."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_h2o
from cache_checks import SCALE, exact_trace, random_tokens, rows_by_position, small
from mlx_h2o import H2OConfig, H2OKVCache, QuantizedH2OKVCache, evaluate, fast, use_backend
from mlx_h2o.caches import key_ranks
from mlx_h2o.stores.storage import Storage
from tiny_models import random_prompt, tiny_qwen3


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    for name in ("SECOND_READ_BYTES", "GROUP_READ_BYTES", "DRAFT_READ_BYTES"):
        monkeypatch.setattr(key_ranks, name, -1)


def attend(cache, queries, keys, values, *, routed: bool = True) -> None:
    """A step as routed attention makes it; not routed: attention that says nothing."""
    length = keys.shape[2]
    k, v = cache.update_and_fetch(mx.array(keys), mx.array(values))
    if routed and cache.ranks_keys(mx.array(queries), k):
        mask = None if length == 1 else "causal"
        mx.eval(cache.attend(mx.array(queries), k, v, scale=SCALE, mask=mask))
    else:
        mx.eval(k, v)


def kept(cache) -> dict:
    return rows_by_position(cache)[0]


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    max_kv_size=st.integers(3, 8),
    shared_heads=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_rows_are_those_of_a_second_read(data, max_kv_size, shared_heads, seed):
    """Exact keys with many ties, chunks between tokens, steps without routing."""
    lengths = data.draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, 3]), min_size=4, max_size=20))
    routed = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    config = H2OConfig(
        max_kv_size=max_kv_size,
        sink_size=data.draw(st.integers(0, 2)),
        recent_size=1,
        policy="keydiff",
        shared_heads=shared_heads,
    )
    _, keys = exact_trace(np.random.default_rng(seed), lengths)
    ours, theirs = H2OKVCache(config), H2OKVCache(config)
    start = 0
    for length, with_attention in zip(lengths, routed, strict=True):
        part = keys[:, :, start : start + length]
        start += length
        queries = np.ones((2, 4, length, 4), np.float32)
        attend(ours, queries, part, part, routed=with_attention)
        attend(theirs, queries, part, part, routed=False)
        assert kept(ours) == kept(theirs)


@pytest.mark.parametrize("backend", [None, "composed"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_after_1100_replacements_the_ranks_are_exact(dtype, backend, monkeypatch):
    """Statistics kept up to date for a long time; made anew once in between."""
    fresh = []
    of = key_ranks.KeyRanks.of
    monkeypatch.setattr(
        key_ranks.KeyRanks, "of", classmethod(lambda cls, *a: fresh.append(1) or of(*a))
    )
    rng = np.random.default_rng(1)
    cache = small("keydiff")
    with use_backend(backend):
        for _ in range(16 + 1100):
            queries, keys, values = (mx.array(part).astype(dtype) for part in random_tokens(rng, 1))
            k, v = cache.update_and_fetch(keys, values)
            if cache.ranks_keys(queries, k):
                mx.eval(cache.attend(queries, k, v, scale=SCALE))
    assert len(fresh) == 2
    expected = np.array(fast.key_diversity(cache.keys))
    tolerance = 1e-4 if dtype == mx.bfloat16 else 2e-6
    np.testing.assert_allclose(np.array(cache.scores), expected, rtol=0, atol=tolerance)


def test_the_keys_are_read_once(monkeypatch):
    """In the steady state nothing asks for a second read: neither ranks nor statistics."""
    rng = np.random.default_rng(2)
    cache = small("keydiff")
    for _ in range(20):
        attend(cache, *random_tokens(rng, 1))

    def second_read(*_, **__):
        raise AssertionError("the keys are read a second time")

    monkeypatch.setattr(fast, "key_diversity", second_read)
    monkeypatch.setattr(fast, "key_statistics", second_read)
    monkeypatch.setattr(Storage, "dense", second_read, raising=True)
    for _ in range(30):
        attend(cache, *random_tokens(rng, 1))
    assert cache.evicted == 34
    with pytest.raises(AssertionError, match="second time"):
        fast.key_diversity(cache.keys)


def test_composed_attention_reads_keys_once_for_queries_and_probes(tmp_path):
    """One product with the keys, queries and probes its rows."""
    arrays = [mx.random.normal((1, heads, rows, 32)) for heads, rows in ((4, 1), (2, 9), (2, 9))]
    with use_backend("composed"):
        found = fast.scaled_dot_product_attention_with_probes(
            *arrays, mx.ones((1, 2, 1, 32)), scale=0.1
        )
    mx.export_to_dot(str(tmp_path / "graph.dot"), *found)
    assert (tmp_path / "graph.dot").read_text().count('label ="Matmul"') == 2  # keys, values


def test_a_copy_and_a_restored_cache_go_on_alike():
    rng = np.random.default_rng(3)
    cache = small("keydiff")
    for _ in range(30):
        attend(cache, *random_tokens(rng, 1))
    others = [copy.deepcopy(cache), H2OKVCache.from_state(cache.state)]
    for _ in range(30):
        tokens = random_tokens(rng, 1)
        for each in (cache, *others):
            attend(each, *tokens)
        assert kept(cache) == kept(others[0]) == kept(others[1])


def test_keys_that_are_set_are_ranked_anew():
    rng = np.random.default_rng(4)
    cache, other = small("keydiff"), small("keydiff")
    for _ in range(20):
        tokens = random_tokens(rng, 1)
        attend(cache, *tokens)
        attend(other, *tokens, routed=False)
    for each in (cache, other):
        each.keys = each.keys * mx.arange(16)[None, None, :, None] - 3
    for _ in range(5):
        tokens = random_tokens(rng, 1)
        attend(cache, *tokens)
        attend(other, *tokens, routed=False)
        assert kept(cache) == kept(other)


def test_ranks_that_are_forgotten_are_made_anew():
    rng = np.random.default_rng(8)
    cache, other = small("keydiff"), small("keydiff")
    for index in range(30):
        tokens = random_tokens(rng, 1)
        attend(cache, *tokens)
        attend(other, *tokens, routed=False)
        if index >= 20:
            cache.reset_scores()
        assert kept(cache) == kept(other)


@pytest.mark.parametrize("scale", [0.3, 1.0, 7.0])
def test_importance_is_minus_the_cosine_at_any_scale(scale):
    rng = np.random.default_rng(5)
    cache = small("keydiff")
    for _ in range(20):
        queries, keys, values = (mx.array(part) for part in random_tokens(rng, 1))
        k, v = cache.update_and_fetch(keys, values)
        cache.attend(queries, k, v, scale=scale)
    np.testing.assert_allclose(
        np.array(cache.scores), np.array(fast.key_diversity(cache.keys)), atol=1e-6
    )


def test_in_a_model_one_read_and_two_keep_the_same_rows(monkeypatch):
    model = tiny_qwen3()
    prompt = random_prompt(120)
    caches = [mlx_h2o.make_prompt_cache(model, 24, policy="keydiff") for _ in range(2)]
    evaluate.prefill(model, caches[0], prompt[:70], chunk=16)
    evaluate.prefill(model, caches[0], prompt[70:], chunk=1)
    monkeypatch.setattr(key_ranks, "SECOND_READ_BYTES", 1 << 60)
    evaluate.prefill(model, caches[1], prompt[:70], chunk=16)
    evaluate.prefill(model, caches[1], prompt[70:], chunk=1)
    for routed, plain in zip(*caches, strict=True):
        assert np.isfinite(np.array(routed.scores)).all()  # ranks came with attention
        assert np.isnan(np.array(plain.scores)).all()
        assert kept(routed) == kept(plain)


def test_a_small_cache_on_a_cpu_is_read_twice(monkeypatch):
    monkeypatch.undo()
    cache = small("keydiff")
    rng = np.random.default_rng(6)
    for _ in range(20):
        queries, keys, values = (mx.array(part) for part in random_tokens(rng, 1))
        k, _ = cache.update_and_fetch(keys, values)
    assert mx.default_device().type == mx.DeviceType.gpu or not cache.ranks_keys(queries, k)


@pytest.mark.parametrize("backend", [None, "composed"])
@pytest.mark.parametrize(("bits", "dtype"), [(8, mx.float32), (4, mx.float16), (8, mx.bfloat16)])
def test_packed_rows_are_ranked_in_one_read_too(bits, dtype, backend):
    """The keys as they are stored are what is ranked; the same rows as by a second read."""
    rng = np.random.default_rng(7)
    config = H2OConfig(
        max_kv_size=16, sink_size=2, recent_size=4, policy="keydiff", kv_bits=bits, kv_group_size=32
    )
    ours, theirs = QuantizedH2OKVCache(config), QuantizedH2OKVCache(config)
    with use_backend(backend):
        for _ in range(60):
            shapes = ((2, 4, 1, 32), (2, 2, 1, 32), (2, 2, 1, 32))
            queries, keys, values = (
                mx.array(rng.standard_normal(shape)).astype(dtype) for shape in shapes
            )
            k, v = ours.update_and_fetch(keys, values)
            if ours.ranks_keys(queries, k):
                mx.eval(ours.attend(queries, k, v, scale=SCALE))
                words, *affine = k
                exact = mx.dequantize(
                    words, *(part.astype(mx.float32) for part in affine), group_size=32, bits=bits
                )
                expected = np.array(fast.key_diversity(exact))
                tolerance = 1e-4 if dtype == mx.bfloat16 else 2e-6
                np.testing.assert_allclose(np.array(ours.scores), expected, atol=tolerance)
            mx.eval(*theirs.update_and_fetch(keys, values)[0])
            if dtype == mx.float32:
                assert kept(ours) == kept(theirs)
    assert ours.evicted == 44
    assert ours._key_ranks.replaced == 44  # kept up to date, not made anew


@pytest.mark.parametrize("backend", [None, "composed"])
@pytest.mark.parametrize("given", [{"light_bits": 4}, {"v_bits": 4, "dense_size": 3}])
@pytest.mark.parametrize("shared_heads", [False, True])
def test_rows_of_mixed_precision_are_ranked_in_one_read_too(given, shared_heads, backend):
    """Each segment as it is stored; the same rows as by a second read."""
    rng = np.random.default_rng(7)
    config = H2OConfig(
        max_kv_size=16, sink_size=2, recent_size=4, policy="keydiff", kv_bits=8, kv_group_size=32,
        shared_heads=shared_heads, **given,
    )  # fmt: skip
    ours, theirs = QuantizedH2OKVCache(config), QuantizedH2OKVCache(config)
    with use_backend(backend):
        for _ in range(60):
            shapes = ((2, 4, 1, 32), (2, 2, 1, 32), (2, 2, 1, 32))
            queries, keys, values = (
                mx.array(rng.standard_normal(shape), mx.float32) for shape in shapes
            )
            k, v = ours.update_and_fetch(keys, values)
            if ours.ranks_keys(queries, k):
                mx.eval(ours.attend(queries, k, v, scale=SCALE))
                expected = np.array(fast.key_diversity(k))
                if shared_heads:
                    expected = np.broadcast_to(expected.mean(axis=1, keepdims=True), expected.shape)
                np.testing.assert_allclose(np.array(ours.scores), expected, atol=2e-6)
            mx.eval(*theirs.update_and_fetch(keys, values)[0])
            assert kept(ours) == kept(theirs)
    assert ours.evicted == 44
    if backend is None and mx.default_device().type == mx.DeviceType.cpu:
        assert ours._key_ranks.replaced > 40  # kept up to date, not made anew
