"""QuantizedH2OKVCache: each row is quantised once, and otherwise it is an H2OKVCache."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from cache_checks import (
    SCALE,
    check_graph,
    check_lengths_after_replacements,
    check_trace,
    exact_trace,
    random_tokens,
    step,
)
from mlx_h2o import (
    H2OConfig,
    H2OKVCache,
    QuantizedH2OKVCache,
    load_prompt_cache,
    policies,
    save_prompt_cache,
)
from mlx_h2o.stores import packing

POLICIES = policies.names()
SIZE = 64
WIDTHS = [(8, None, 64), (4, None, 32), (8, 4, 64), (3, 6, 32)]


def quantised(bits=8, v_bits=None, group_size=64):
    """A maker of caches with these bits, as H2OKVCache is one."""

    def make(config: H2OConfig, name: str = "tiny layer 0") -> QuantizedH2OKVCache:
        settings = {"kv_bits": bits, "v_bits": v_bits, "kv_group_size": group_size}
        return QuantizedH2OKVCache(replace(config, **settings), name=name)

    return make


def rounded(rows: np.ndarray, bits: int, group_size: int) -> np.ndarray:
    """Rows quantised and read again, each by itself and once."""
    parts = mx.quantize(mx.array(rows), group_size=group_size, bits=bits)
    return np.array(mx.dequantize(*parts, group_size=group_size, bits=bits))


def small(policy="h2o", make=None, **given) -> QuantizedH2OKVCache:
    chosen = {"max_kv_size": 16, "sink_size": 2, "recent_size": 4, "policy": policy} | given
    return (make or quantised())(H2OConfig(**chosen))


def filled(policy="h2o", tokens=40, **given):
    rng = np.random.default_rng(9)
    cache = small(policy, **given)
    for _ in range(tokens):
        step(cache, *random_tokens(rng, 1, SIZE))
    return cache, rng


def arrays_of(state) -> list[np.ndarray]:
    return [np.array(array) for _, array in tree_flatten(list(state[:4]))]


def assert_same(state, other) -> None:
    for one, two in zip(arrays_of(state), arrays_of(other), strict=True):
        np.testing.assert_array_equal(one, two)


class Compacting(QuantizedH2OKVCache):
    """Never replaces in place: a row goes by a gather of the packed arrays."""

    def _append(self, store, keys, values):
        added = keys.shape[2]
        if added == 1 and store.length >= self._limit:
            self._compact(store, self.config.max_kv_size - 1, added)
            store.append(keys, values, self.offset, self._limit)
        else:
            super()._append(store, keys, values)


# What is kept, and what attention makes of it


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("bits", "v_bits", "group_size"), WIDTHS)
def test_lengths_1_to_8_equal_the_reference_of_rows_rounded_once(policy, bits, v_bits, group_size):
    check_lengths_after_replacements(
        quantised(bits, v_bits, group_size),
        policy,
        replacements=30,
        size=SIZE,
        stored=lambda keys, values: (
            rounded(keys, bits, group_size),
            rounded(values, v_bits or bits, group_size),
        ),
    )


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    policy=st.sampled_from(["h2o", "window"]),
    evict_every=st.integers(1, 8),
    max_kv_size=st.integers(3, 8),
    seed=st.integers(0, 2**16),
)
def test_replacement_and_compaction_keep_the_same_packed_rows(
    data, policy, evict_every, max_kv_size, seed
):
    """At every step, equal scores given: the positions of a dense cache, the rows packed once."""
    sink_size = data.draw(st.integers(0, max_kv_size - 1), "sink_size")
    recent_size = data.draw(st.integers(0, max_kv_size - sink_size), "recent_size")
    lengths = data.draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, 3, 9]), min_size=1), "lengths")
    while sum(lengths) > 21:  # sums of halves stay exact in float32
        lengths.pop()
    config = H2OConfig(
        max_kv_size=max_kv_size,
        sink_size=sink_size,
        heavy_size=max_kv_size - sink_size - recent_size,
        recent_size=recent_size,
        policy=policy,
        decay=0.5,
        evict_every=evict_every,
    )
    scores, keys = exact_trace(np.random.default_rng(seed), lengths, size=32)
    packed = replace(config, kv_bits=4, kv_group_size=32)
    caches = [H2OKVCache(config), QuantizedH2OKVCache(packed), Compacting(packed)]
    check_trace(caches, config, lengths, scores, keys)


@pytest.mark.parametrize(("bits", "v_bits", "group_size"), WIDTHS)
@pytest.mark.parametrize("policy", ["h2o", "keydiff"])
def test_attention_that_ranks_and_names_rows_keeps_the_same(policy, bits, v_bits, group_size):
    """What attention says of packed rows on the way is what operations of their own say."""
    rng = np.random.default_rng(8)
    by_itself, apart = (small(policy, make=quantised(bits, v_bits, group_size)) for _ in range(2))
    for length in (20, *[1] * 40, 3, 1, 1, 8, 1, 1):
        queries, keys, values = (mx.array(rows) for rows in random_tokens(rng, length, SIZE))
        expected = step(apart, np.array(queries), np.array(keys), np.array(values))
        mask = by_itself.make_mask(length)
        k, v = by_itself.update_and_fetch(keys, values)
        if length > 8:
            by_itself.score_chunk(queries, k, scale=SCALE, mask=mask)
        else:
            out = by_itself.attend(queries, k, v, scale=SCALE, mask=mask)
            np.testing.assert_allclose(np.array(out), expected, rtol=0, atol=2e-5)
        assert_same((by_itself.keys, by_itself.positions), (apart.keys, apart.positions))


@pytest.mark.parametrize("length", [1, 8, 9])
def test_up_to_8_tokens_rows_are_handed_out_packed(length):
    cache, rng = filled()
    _, keys, values = random_tokens(rng, length, SIZE)
    k, v = cache.update_and_fetch(mx.array(keys), mx.array(values))
    packed = length <= 8
    assert isinstance(k, tuple) == isinstance(v, tuple) == packed
    assert hasattr(cache, "bits") == packed  # mlx_lm's attention takes it for packed rows
    if packed:
        assert [part.shape[2] for part in (*k, *v)] == [cache.positions.shape[2]] * 6
    else:
        np.testing.assert_array_equal(np.array(k)[:, :, -length:], rounded(keys, 8, 64))
    again, _ = cache.keys_and_values()
    assert isinstance(again, tuple) == packed


@pytest.mark.parametrize("policy", POLICIES)
def test_the_output_does_not_depend_on_how_the_tokens_come(policy):
    """Prefill reads what is stored, so chunks of 9 and single tokens see the same rows."""
    rng = np.random.default_rng(3)
    tokens = random_tokens(rng, 12, SIZE)
    whole, by_one = (small(policy, max_kv_size=20) for _ in range(2))
    out = step(whole, *tokens)
    for index in range(12):
        part = step(by_one, *(array[:, :, index : index + 1] for array in tokens))
        np.testing.assert_allclose(part[:, :, 0], out[:, :, index], rtol=0, atol=2e-5)
    assert_same((whole.keys, whole.values), (by_one.keys, by_one.values))


@pytest.mark.parametrize("policy", POLICIES)
def test_chunked_prefill_holds_the_budget_and_one_chunk(policy):
    rng = np.random.default_rng(4)
    cache = small(policy)
    for length in (30, 7, 30, 1, 30, 2):
        _, keys, values = random_tokens(rng, length, SIZE)
        cache.update_and_fetch(mx.array(keys), mx.array(values))
        rows = cache.positions.shape[2]
        assert rows <= 16 + length
        cache.update_scores(mx.zeros((2, 4, length, rows)))
        assert cache.size() <= 16
    assert (cache.offset, cache.evicted) == (100, 84)


@pytest.mark.parametrize("evict_every", [1, 5])
def test_evict_every_stores_as_many_rows_more(evict_every):
    rng = np.random.default_rng(3)
    cache = small(evict_every=evict_every)
    sizes = []
    for _ in range(40):
        step(cache, *random_tokens(rng, 1, SIZE))
        sizes.append(cache.size())
    assert max(sizes) == 16 + evict_every - 1
    assert min(sizes[16:]) == 16


# Bytes and memory


@pytest.mark.parametrize(("bits", "v_bits", "group_size"), WIDTHS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_nbytes_counts_every_array(bits, v_bits, group_size, dtype):
    cache = small("window", make=quantised(bits, v_bits, group_size))
    token = mx.random.normal((1, 2, 1, SIZE)).astype(dtype)
    for _ in range(20):
        cache.update_and_fetch(token, token)
    groups = 2 * SIZE // group_size * dtype.size  # a scale and a bias each
    row = SIZE * bits // 8 + SIZE * (v_bits or bits) // 8 + 2 * groups + 4 + 4
    assert cache.nbytes == 2 * 16 * row
    kept = sum(array.nbytes for _, array in tree_flatten(cache.state[:4]))
    assert kept == cache.nbytes


@pytest.mark.parametrize("policy", ["h2o", "window"])
def test_a_replacement_writes_in_place(policy):
    """No second copy of packed keys or values is made at the budget."""
    cache = quantised()(H2OConfig(max_kv_size=1024, policy=policy))
    rows = mx.zeros((1, 2, 1024, 256))
    cache.update_and_fetch(rows, rows)
    cache.update_scores(mx.ones((1, 2, 1, 1024)))
    token, scores = mx.ones((1, 2, 1, 256)), mx.ones((1, 2, 1, 1024))
    for _ in range(3):
        _advance(cache, token, scores)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(20):
        _advance(cache, token, scores)
    assert mx.get_peak_memory() - before < cache.keys[0].nbytes / 2


def _advance(cache, token, scores):
    keys, values = cache.update_and_fetch(token, token)
    total = keys[0][0, 0, 0, 0] + values[0][0, 0, 0, 0]
    cache.update_scores(scores, masked=False)
    mx.eval(total, cache.scores)


@pytest.mark.parametrize("policy", ["h2o", "window"])
@pytest.mark.parametrize("budget", [8, 400])
def test_no_graph_hangs_on_the_keys(policy, budget):
    check_graph(policy, budget=budget, make=quantised(), size=SIZE)


# The contract of H2OKVCache


def test_an_empty_cache():
    cache = QuantizedH2OKVCache()
    assert (cache.bits, cache.group_size) == (8, 64)
    assert cache.empty() and cache.is_trimmable() and cache.trim(3) == 0
    assert (cache.size(), cache.nbytes, cache.offset) == (0, 0, 0)
    assert (cache.keys, cache.values, cache.scores, cache.positions) == (None,) * 4
    again = QuantizedH2OKVCache.from_state(cache.state)
    assert again.empty() and again.config == cache.config


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tokens", [10, 40])
def test_states_and_copies_go_on_alike(policy, tokens):
    cache, rng = filled(policy, tokens, make=quantised(8, 4, 32))
    others = [QuantizedH2OKVCache.from_state(cache.state), copy.deepcopy(cache)]
    before = arrays_of(cache.state)
    more = [random_tokens(rng, length, SIZE) for length in (1, 4, 9, 1, 1)]
    expected = [step(cache, *token) for token in more]
    for other in others:
        assert type(other) is QuantizedH2OKVCache
        assert (other.config, other.name) == (cache.config, cache.name)
        assert other.offset == tokens
        for one, two in zip(arrays_of(other.state), before, strict=True):
            np.testing.assert_array_equal(one, two)
        for token, out in zip(more, expected, strict=True):
            np.testing.assert_array_equal(step(other, *token), out)
        assert_same(other.state, cache.state)


def test_trim_is_exact_before_the_first_eviction():
    rng = np.random.default_rng(6)
    tokens = [random_tokens(rng, 1, SIZE) for _ in range(12)]
    cache, shorter = small("keydiff"), small("keydiff")
    for token in tokens:
        step(cache, *token)
    for token in tokens[:7]:
        step(shorter, *token)
    assert cache.trim(5) == 5
    assert_same(cache.state, shorter.state)
    for length in (3, 1, 9, 1, 1):
        token = random_tokens(rng, length, SIZE)
        np.testing.assert_array_equal(step(cache, *token), step(shorter, *token))
    with pytest.raises(ValueError, match=r"tiny layer 0 has evicted rows"):
        cache.trim(1)


def test_what_was_handed_out_does_not_change():
    cache, rng = filled()
    held = [*cache.keys, *cache.values, cache.scores, cache.positions]
    before = [np.array(array) for array in held]
    for length in (1, 1, 9, 1, 1):
        step(cache, *random_tokens(rng, length, SIZE))
    for one, other in zip(held, before, strict=True):
        np.testing.assert_array_equal(np.array(one), other)


def test_keys_and_values_may_be_set():
    cache, _ = filled("window", tokens=10)
    state = arrays_of(cache.state)
    cache.keys = mx.depends(cache.keys, mx.zeros((1,)))  # as mlx_lm's pipelines do
    cache.values = tuple(cache.values)
    for one, other in zip(arrays_of(cache.state), state, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match=r"\[H2OKVCache.keys\] found .*words, scales and biases"):
        cache.keys = mx.zeros((2, 2, 10, SIZE))
    with pytest.raises(ValueError, match=r"\[H2OKVCache.values\].*no rows are stored"):
        QuantizedH2OKVCache().values = mx.zeros((1, 1, 1, 4))


def test_rows_of_another_dtype_or_width():
    cache, _ = filled(tokens=3)
    for shape, dtype in (((2, 2, 1, SIZE), mx.float16), ((2, 2, 1, 128), mx.float32)):
        with pytest.raises(ValueError, match="as the stored rows"):
            cache.update_and_fetch(mx.zeros(shape, dtype), mx.zeros(shape, dtype))
    assert cache.offset == 3


def test_saved_and_loaded(tmp_path):
    cache, rng = filled(make=quantised(8, 4, 32))
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, [cache, QuantizedH2OKVCache()])
    loaded, empty = load_prompt_cache(file)
    assert type(loaded) is type(empty) is QuantizedH2OKVCache
    assert empty.empty()
    assert_same(loaded.state, cache.state)
    token = random_tokens(rng, 1, SIZE)
    np.testing.assert_array_equal(step(loaded, *token), step(cache, *token))


# Groups


def test_a_width_that_the_group_does_not_divide_takes_32_and_says_so_once(monkeypatch):
    monkeypatch.setattr(packing, "_warned", set())
    rows = mx.random.normal((1, 1, 1, 96))
    first, second = small("window"), small("window")
    with pytest.warns(UserWarning, match=r"96.*kv_group_size = 64 does not divide: groups of 32"):
        first.update_and_fetch(rows, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.update_and_fetch(rows, rows)
        assert (first.group_size, second.group_size) == (32, 32)
        restored = QuantizedH2OKVCache.from_state(second.state)
        assert restored.group_size == 32
        assert second.to_quantized(group_size=64, bits=8) is second


def test_a_width_that_no_group_divides_is_refused_and_nothing_is_done():
    cache = small("window")
    rows = mx.zeros((1, 1, 1, 80))
    with pytest.raises(ValueError, match=r"tiny layer 0 has keys of 80.*neither .*64 nor 32"):
        cache.update_and_fetch(rows, rows)
    assert cache.empty() and cache.offset == 0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kv_bits": 7}, "kv_bits is 7, expected one of"),
        ({"kv_bits": True}, "kv_bits is True"),
        ({"v_bits": 4}, "v_bits is 4 and kv_bits is None"),
        ({"kv_bits": 8, "v_bits": 1}, "v_bits is 1"),
        ({"kv_bits": 8, "kv_group_size": 48}, "kv_group_size is 48, expected one of"),
    ],
)
def test_settings_that_are_refused(given, text):
    with pytest.raises(ValueError, match=r"^\[H2OConfig\] ") as error:
        H2OConfig(**given)
    assert text in str(error.value)


def test_each_cache_takes_its_own_settings():
    with pytest.raises(ValueError, match=r"\[H2OKVCache\] kv_bits is 8, expected None"):
        H2OKVCache(H2OConfig(kv_bits=8))
    with pytest.raises(ValueError, match=r"\[QuantizedH2OKVCache\] kv_bits is None, expected a"):
        QuantizedH2OKVCache(H2OConfig())


# to_quantized


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tokens", [0, 10, 40])
def test_to_quantized_goes_on_with_the_same_rows(policy, tokens):
    rng = np.random.default_rng(2)
    cache = H2OKVCache(
        H2OConfig(max_kv_size=16, sink_size=2, recent_size=4, policy=policy), name="tiny layer 0"
    )
    for _ in range(tokens):
        step(cache, *random_tokens(rng, 1, SIZE))
    before = arrays_of(cache.state) if tokens else []
    packed = cache.to_quantized(group_size=32, bits=4)
    assert type(packed) is QuantizedH2OKVCache
    assert packed.config == replace(cache.config, kv_bits=4, kv_group_size=32)
    assert (packed.offset, packed.evicted, packed.name) == (cache.offset, cache.evicted, cache.name)
    assert packed.to_quantized(group_size=32, bits=4) is packed
    with pytest.raises(ValueError, match=r"bits 8, expected 32 and 4 as .*tiny layer 0"):
        packed.to_quantized(group_size=32, bits=8)
    if tokens:
        for one, other in ((packed.scores, cache.scores), (packed.positions, cache.positions)):
            np.testing.assert_array_equal(np.array(one), np.array(other))
        expected = mx.quantize(cache.keys, group_size=32, bits=4)
        for one, other in zip(packed.keys, expected, strict=True):
            np.testing.assert_array_equal(np.array(one), np.array(other))
        for one, other in zip(arrays_of(cache.state), before, strict=True):
            np.testing.assert_array_equal(one, other)
    for length in (1, 3, 9, 1):
        step(packed, *random_tokens(rng, length, SIZE))
    assert packed.offset == tokens + 14
