"""Mixed precision: the newest rows dense, older ones packed once, the light half coarser."""

from __future__ import annotations

import copy
import tempfile

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from cache_checks import SCALE, check_graph, exact_trace, random_tokens, rows_by_position
from mlx_h2o import (
    H2OConfig,
    H2OKVCache,
    QuantizedH2OKVCache,
    fast,
    load_prompt_cache,
    make_prompt_cache,
    policies,
    routing,
    save_prompt_cache,
)
from mlx_h2o.caches import stored_attention
from mlx_h2o.stores.recoding import recoded
from mlx_h2o.stores.storage import Segment
from reference_cache import ReferenceCache
from tiny_models import random_prompt, tiny_qwen3

POLICIES = policies.names()
SIZE = 32
BY_RANK = {"kv_bits": 8, "light_bits": 4, "kv_group_size": 32, "dense_size": 4}
BY_PART = {"kv_bits": 8, "v_bits": 4, "kv_group_size": 32, "dense_size": 4}
KINDS = {"8 and 4 by rank": BY_RANK, "K8 V4": BY_PART}


def config(policy="h2o", **given) -> H2OConfig:
    chosen = {"max_kv_size": 20, "sink_size": 2, "recent_size": 6, "policy": policy} | given
    return H2OConfig(**chosen)


def mixed(policy="h2o", **given) -> QuantizedH2OKVCache:
    kind = given if "kv_bits" in given else BY_RANK | given
    return QuantizedH2OKVCache(config(policy, **kind), name="tiny layer 0")


def step(cache, queries, keys, values) -> np.ndarray:
    """One update with its attention, as routing makes them."""
    length = keys.shape[2]
    mask = cache.make_mask(length)
    queries = mx.array(queries)
    k, v = cache.update_and_fetch(mx.array(keys), mx.array(values))
    if length > 8:
        out = mx.fast.scaled_dot_product_attention(queries, k, v, scale=SCALE, mask=mask)
        cache.score_chunk(queries, k, scale=SCALE, mask=mask)
    else:
        out = cache.attend(queries, k, v, scale=SCALE, mask=mask)
    return np.array(out)


def filled(policy="h2o", tokens=60, **given):
    rng = np.random.default_rng(9)
    cache = mixed(policy, **given)
    for _ in range(tokens):
        step(cache, *random_tokens(rng, 1, SIZE))
    return cache, rng


def contents(cache) -> dict[tuple[int, ...], tuple[int, np.ndarray, np.ndarray]]:
    """By head and position: which segment holds the row, its key and its value."""
    store = cache._store
    keys, values = (np.array(rows) for rows in store.dense())
    ends = np.cumsum([tier.length for tier in store.tiers])
    found = {}
    for index in np.ndindex(*store.positions.shape):
        segment = int(np.searchsorted(ends, index[2], side="right"))
        position = store.positions[index].item()
        found[(*index[:2], position)] = (segment, keys[index], values[index])
    return found


# Codes


@pytest.mark.parametrize(("bits", "to"), [(8, 4), (8, 2), (4, 2), (4, 8), (2, 8), (8, 8)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_recoded_rows_keep_the_upper_bits_or_all(bits, to, dtype):
    rows = mx.random.normal((2, 3, 50, 128), key=mx.random.key(1)).astype(dtype)
    packed = mx.quantize(rows, group_size=64, bits=bits)
    again = recoded(packed, bits, to)
    expected = mx.quantize(rows, group_size=64, bits=to)
    assert [(a.shape, a.dtype) for a in again] == [(a.shape, a.dtype) for a in expected]
    before = mx.dequantize(*packed, group_size=64, bits=bits)
    after = mx.dequantize(*again, group_size=64, bits=to)
    if to >= bits:
        assert mx.array_equal(before, after).item()
        return
    widest = rows.reshape(2, 3, 50, 2, 64)
    widest = widest.max(axis=-1) - widest.min(axis=-1)
    wrong = mx.abs(after - rows).reshape(2, 3, 50, 2, 64).max(axis=-1)
    # Half a step of the new codes, a step of the old ones, and what the dtype rounds.
    bound = widest * (0.5 * 2 ** (bits - to) / (2**bits - 1) + 1 / (2**bits - 1)) + 4e-3
    assert mx.all(wrong <= bound).item()


@pytest.mark.parametrize(("bits", "to"), [(4, 8), (2, 4), (2, 8)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_rows_that_were_given_more_space_come_back_as_they_were(bits, to, dtype):
    rows = mx.random.normal((2, 3, 50, 128), key=mx.random.key(2)).astype(dtype)
    packed = mx.quantize(rows, group_size=64, bits=bits)
    again = recoded(recoded(packed, bits, to), to, bits)
    assert all(mx.array_equal(one, other).item() for one, other in zip(packed, again, strict=True))


# What is kept


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(sorted(KINDS)),
    policy=st.sampled_from(["h2o", "window"]),
    evict_every=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_the_positions_of_a_dense_cache_at_every_step(data, kind, policy, evict_every, seed):
    """Equal scores given. And: rows get coarser once per step down, never finer, never anew."""
    max_kv_size = data.draw(st.integers(4, 9), "max_kv_size")
    dense_size = data.draw(st.integers(1, 2), "dense_size")
    recent_size = data.draw(st.integers(dense_size + 1, max_kv_size - 1), "recent_size")
    sink_size = data.draw(st.integers(0, max_kv_size - recent_size), "sink_size")
    lengths = data.draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, 3, 9]), min_size=1), "lengths")
    while sum(lengths) > 21:  # sums of halves stay exact in float32
        lengths.pop()
    chosen = {
        "max_kv_size": max_kv_size,
        "sink_size": sink_size,
        "heavy_size": max_kv_size - sink_size - recent_size,
        "recent_size": recent_size,
        "policy": policy,
        "decay": 0.5,
        "evict_every": evict_every,
    }
    cache = QuantizedH2OKVCache(H2OConfig(**chosen, **(KINDS[kind] | {"dense_size": dense_size})))
    caches = [cache, H2OKVCache(H2OConfig(**chosen))]
    rng = np.random.default_rng(seed)
    scores, _ = exact_trace(rng, lengths)
    rows = rng.standard_normal((2, 2, sum(lengths), SIZE)).astype(np.float32)
    slow = ReferenceCache(caches[1].config, 2, 2)
    start, before = 0, {}
    for length in lengths:
        part = slice(start, start + length)
        start += length
        slow.update(rows[:, :, part], rows[:, :, part])
        slow.absorb(scores[:, :, part])
        for one in caches:
            one.update_and_fetch(mx.array(rows[:, :, part]), mx.array(rows[:, :, part]))
            slots = mx.repeat(one.positions, 2, axis=1)
            slots = mx.broadcast_to(slots[:, :, None], (*slots.shape[:2], length, slots.shape[2]))
            one.update_scores(mx.take_along_axis(mx.array(scores[:, :, part]), slots, axis=-1))
            assert rows_by_position(one)[0] == slow.positions()
        before = check_rows(cache, rows, before)


def check_rows(cache, rows, before):
    """Rows as they should be, given where each was before; returns where each is."""
    now, packings = contents(cache), [tier.packing for tier in cache._store.tiers]
    newest = sorted({place[2] for place in now})[-cache.config.dense_rows :]
    light = {place for place, (segment, *_) in before.items() if segment == 1 < len(packings)}
    for place, (segment, *found) in now.items():
        if segment == len(packings):
            assert place not in before or before[place][0] == segment  # packed stays packed
            for row in found:
                np.testing.assert_array_equal(row, rows[place])
            continue
        assert place[2] not in newest
        bits = packings[segment].bits, packings[segment].v_bits
        # MLX moves the scale so that 0 is a level: errors reach a step at the other end.
        steps = [np.ptp(rows[place]) / (2**width - 1) for width in bits]
        wrong = [np.abs(row - rows[place]).max() for row in found]
        if any(one > 1.1 * step for one, step in zip(wrong, steps, strict=True)):
            # Two evictions in one update may cut a row down and give it a heavy slot again.
            assert place in light or cache.config.evict_every > 1
            assert max(wrong) <= 1.1 * np.ptp(rows[place]) / (2**4 - 1)
            light = light | {place}
        was = before[place][0] if place in before else None
        if was == segment or (was == 1 < len(packings)):
            same = all(map(np.array_equal, found, before[place][1:]))
            assert same or (place in light and was == 0)
        if place in light:
            now[place] = (1, *found)  # it gains nothing in a heavy slot
    return now


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("policy", POLICIES)
def test_at_the_budget_the_newest_are_dense_and_the_rest_in_halves(policy, kind):
    cache, rng = filled(policy, **KINDS[kind])
    for length in (1, 3, 12, 30, 1, 1):
        step(cache, *random_tokens(rng, length, SIZE))
        assert cache.size() == 20
        store = cache._store
        sizes = [tier.length for tier in store.tiers]
        assert (sizes, store.keys.shape[2]) == ([8, 8] if kind != "K8 V4" else [16], 4)
        newest = np.array(cache.positions)[:, :, -4:]
        expected = np.arange(cache.offset - 4, cache.offset)
        np.testing.assert_array_equal(newest, np.broadcast_to(expected, newest.shape))


def test_a_row_gets_the_bits_of_its_rank_when_it_leaves():
    """Heavier than the lightest heavy row: 8 bits, and that one sinks if its tier has no place."""
    cache, rng = filled()
    heavy_ones = 0
    for _ in range(30):
        before, scores = contents(cache), rows_by_position(cache)
        leaving = cache.offset - 4
        step(cache, *random_tokens(rng, 1, SIZE))
        now = contents(cache)
        for b, h in np.ndindex(2, 2):
            rank = dict(zip(scores[0][b, h], scores[1][b, h], strict=True))
            heavy = [p for (i, j, p), row in before.items() if (i, j) == (b, h) and row[0] == 0]
            gone = {p for i, j, p in before if (i, j) == (b, h)} - {
                p for i, j, p in now if (i, j) == (b, h)
            }
            zone = range(cache.config.sink_size, cache.offset - cache.config.recent_size)
            assert gone == {min((p for p in rank if p in zone), key=rank.__getitem__)}
            deserves = rank[leaving] > min(rank[p] for p in heavy) or gone <= set(heavy)
            assert now[b, h, leaving][0] == (0 if deserves else 1)
            heavy_ones += deserves
            sunk = [p for p in heavy if (b, h, p) in now and now[b, h, p][0] == 1]
            expected = [min(heavy, key=rank.__getitem__)] if deserves else []
            assert sunk == ([] if gone <= set(heavy) else expected)
    assert 0 < heavy_ones < 120


# Attention


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("kind", [None, "causal", "bool", "additive", "all masked"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_segments_merge_to_attention_over_one_array(length, kind, with_sinks):
    rng = np.random.default_rng(1)
    parts = [[mx.array(rng.standard_normal((2, 2, n, SIZE)), mx.float32) for _ in "kv"]
             for n in (7, 5, 9)]  # fmt: skip
    queries = mx.array(rng.standard_normal((2, 4, length, SIZE)), mx.float32)
    masks = {
        None: None,
        "causal": "causal",
        "bool": mx.array(rng.random((2, 1, length, 21)) < 0.4),
        "additive": mx.array(rng.standard_normal((length, 21)), mx.float32),
        "all masked": mx.zeros((2, 1, length, 21), mx.bool_),
    }
    sinks = mx.array([0.0, 1.0, -1.0, 3.0]) if with_sinks else None
    given = {"scale": SCALE, "mask": masks[kind], "sinks": sinks}
    whole = fast.scaled_dot_product_attention_with_scores(
        queries, *(mx.concatenate(rows, axis=2) for rows in zip(*parts, strict=True)),
        return_lse=True, **given,
    )  # fmt: skip
    segments = [Segment(k, v, {}) for k, v in parts]
    found = stored_attention.merged_attention(segments, queries, **given)
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_attention_reads_what_the_arrays_say(policy, kind):
    """Segments read apart, or the arrays that others are given: the same output."""
    rng = np.random.default_rng(4)
    cache = mixed(policy, **KINDS[kind])
    for length in (12, *[1] * 30, 2, 5, 8, 1, 20, 1):
        queries, keys, values = random_tokens(rng, length, SIZE)
        mask = cache.make_mask(length)
        k, v = cache.update_and_fetch(mx.array(keys), mx.array(values))
        assert not hasattr(cache, "bits")
        given = {"scale": SCALE, "mask": mask}
        expected, scores = fast.scaled_dot_product_attention_with_scores(
            mx.array(queries), k, v, **given
        )
        np.testing.assert_array_equal(np.array(k)[:, :, -length:], keys)
        if length > 8:
            cache.update_scores(scores)
        else:
            out = cache.attend(mx.array(queries), k, v, **given)
            np.testing.assert_allclose(np.array(out), np.array(expected), rtol=0, atol=2e-5)


@pytest.mark.parametrize("policy", ["h2o", "window", "keydiff"])
def test_in_a_model(policy):
    """Close to the dense cache's logits, the same inside and outside of routing."""
    model = tiny_qwen3(head_dim=32)
    prompt = random_prompt(60)
    found = []
    for settings_of, routed in (({}, True), (BY_RANK, True), (BY_RANK, False)):
        given = {"max_kv_size": 64, "recent_size": 20, "policy": policy}
        caches = make_prompt_cache(model, **given, **settings_of)
        logits = []
        with routing(model) if routed or policy == "h2o" else mx.stream(mx.cpu):
            for start, stop in ((0, 30), *((i, i + 1) for i in range(30, 60))):
                tokens = mx.array(prompt[start:stop])[None]
                logits.append(model(tokens, cache=caches)[0])
                mx.eval(logits[-1], [cache.state for cache in caches])
        found.append(np.array(mx.concatenate(logits)))
    np.testing.assert_allclose(found[1], found[2], rtol=0, atol=1e-3)
    off = np.abs(found[1] - found[0]).max(axis=-1)
    assert off[:29].max() < 1e-3  # nothing is packed before the first chunk is over
    assert off.max() < 0.3 * np.abs(found[0]).max()


# Bytes, graphs, and the contract


def test_nbytes_counts_what_is_stored():
    packed = {8: SIZE + 8, 4: SIZE // 2 + 8}
    expected = {"8 and 4 by rank": 8 * 2 * packed[8] + 8 * 2 * packed[4],
                "K8 V4": 16 * (packed[8] + packed[4])}  # fmt: skip
    for kind, settings_of in KINDS.items():
        cache, _ = filled(**settings_of)
        dense = 4 * 2 * SIZE * 4
        assert cache.nbytes == 4 * (expected[kind] + dense + 20 * 8)
        assert sum(a.nbytes for _, a in tree_flatten(cache.state[:4])) == cache.nbytes


@pytest.mark.parametrize("policy", ["h2o", "window"])
@pytest.mark.parametrize("budget", [8, 400])
def test_no_graph_hangs_on_the_arrays(policy, budget):
    def make(config):
        given = {"max_kv_size": budget, "sink_size": 1, "recent_size": 4, "policy": policy}
        return QuantizedH2OKVCache(H2OConfig(**given, **(BY_RANK | {"dense_size": 2})))

    check_graph(policy, budget=budget, make=make, size=SIZE, most=2000)


@pytest.mark.parametrize("policy", ["h2o", "window"])
@pytest.mark.parametrize("budget", [20, 400])
def test_no_graph_hangs_on_the_output(policy, budget):
    """Where attention reads the segments, nobody computes the arrays."""
    rng = np.random.default_rng(2)
    cache = mixed(policy, max_kv_size=budget)
    sizes = []
    for index in range(150):
        queries, keys, values = (mx.array(a) for a in random_tokens(rng, 1, SIZE))
        k, v = cache.update_and_fetch(keys, values)
        mx.eval(cache.attend(queries, k, v, scale=SCALE))
        del k, v
        if index in (50, 138):  # as long after rows left below the budget
            arrays = [array for _, array in tree_flatten(cache.state[:4])]
            with tempfile.NamedTemporaryFile("r", suffix=".dot") as file:
                mx.export_to_dot(file.name, *arrays)
                sizes.append(file.read().count("->"))
    assert sizes[0] == sizes[1] < 80, sizes


def test_a_step_at_the_budget_copies_no_packed_rows():
    cache = QuantizedH2OKVCache(H2OConfig(max_kv_size=2048, policy="h2o", kv_bits=8, light_bits=4))
    rng = np.random.default_rng(2)
    step(cache, *random_tokens(rng, 2048, 256))
    tokens = [random_tokens(rng, 1, 256) for _ in range(10)]
    for token in tokens[:4]:
        step(cache, *token)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    store = cache._store
    for token in tokens[4:]:
        k, v = cache.update_and_fetch(*(mx.array(rows) for rows in token[1:]))
        mx.eval([*(part for tier in store.tiers for part in tier.arrays()), cache.positions])
        cache.update_scores(mx.ones((2, 4, 1, 2048)))
        mx.eval(cache.scores)
        del k, v
    assert mx.get_peak_memory() - before < store.tiers[0].keys[0].nbytes


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("tokens", [0, 3, 10, 60])
def test_states_copies_and_files_go_on_alike(kind, tokens, tmp_path):
    cache, rng = filled(tokens=tokens, **KINDS[kind])
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, [cache])
    others = [
        QuantizedH2OKVCache.from_state(cache.state),
        copy.deepcopy(cache),
        load_prompt_cache(file)[0],
    ]
    more = [random_tokens(rng, length, SIZE) for length in (1, 4, 12, 1, 1)]
    expected = [step(cache, *token) for token in more]
    for other in others:
        assert (other.config, other.offset) == (cache.config, tokens)
        for token, out in zip(more, expected, strict=True):
            np.testing.assert_array_equal(step(other, *token), out)


@pytest.mark.parametrize("n", [1, 3, 9, 14])
def test_trim_takes_back_the_newest(n):
    """Beyond the dense rows too; the rows that stay are as they were packed."""
    rng = np.random.default_rng(6)
    cache = mixed(max_kv_size=40)
    for _ in range(14):
        step(cache, *random_tokens(rng, 1, SIZE))
    before = contents(cache)
    assert cache.trim(n) == n
    assert (cache.offset, cache.size()) == (14 - n, 14 - n)
    positions, _ = rows_by_position(cache)
    assert all(found == list(range(14 - n)) for found in positions.values())
    for place, (_, key, value) in contents(cache).items():
        # A half is cut anew, so rows may get coarser, never finer.
        if before[place][0] != 0:
            np.testing.assert_array_equal(key, before[place][1])
            np.testing.assert_array_equal(value, before[place][2])
    for length in (1, 12, 1, 1, 30, 1):
        step(cache, *random_tokens(rng, length, SIZE))
    assert cache.size() == 40


def test_keys_and_values_may_be_set():
    cache, _ = filled()
    out = step(copy.deepcopy(cache), *random_tokens(np.random.default_rng(1), 1, SIZE))
    cache.keys = mx.depends(cache.keys, mx.zeros((1,)))  # as mlx_lm's pipelines do
    cache.values = list(cache.values)
    again = step(cache, *random_tokens(np.random.default_rng(1), 1, SIZE))
    np.testing.assert_array_equal(out, again)
    with pytest.raises(ValueError, match=r"\[H2OKVCache.keys\] found .*as stored"):
        cache.keys = cache.keys[:3]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"light_bits": 4}, "light_bits is 4 and kv_bits is None"),
        ({"dense_size": 4}, "dense_size is 4 and kv_bits is None"),
        ({"kv_bits": 8, "light_bits": 3}, "light_bits is 3, expected one of"),
        ({"kv_bits": 6, "light_bits": 4}, "expected kv_bits of 4 or 8"),
        ({"kv_bits": 4, "light_bits": 4}, "expected kv_bits of 4 or 8, and fewer light_bits"),
        ({"kv_bits": 8, "light_bits": 4, "v_bits": 4}, "expected one of them"),
        ({"kv_bits": 8, "dense_size": 64, "recent_size": 64}, "dense_size is 64, expected 0 to 63"),
        ({"kv_bits": 8, "dense_size": -1}, "dense_size is -1"),
    ],
)
def test_settings_that_are_refused(given, text):
    if given.get("recent_size"):
        given = given | {"heavy_size": 252 - given["recent_size"]}
    with pytest.raises(ValueError, match=r"^\[H2OConfig\] ") as error:
        H2OConfig(**given)
    assert text in str(error.value)


def test_the_newest_32_are_dense_by_default():
    assert H2OConfig(kv_bits=8, light_bits=4).dense_rows == 32
    assert H2OConfig(max_kv_size=16, kv_bits=8, light_bits=4).dense_rows == 3
    assert H2OConfig(kv_bits=8, v_bits=4).dense_rows == 0
