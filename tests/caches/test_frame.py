"""Packed rows in a frame of their head: what is stored, and that attention is the same."""

import copy
import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import reference
import reference_frame
from back_ends import BACKENDS
from cache_invariants import check_same_rows
from mlx_h2o import BatchH2OKVCache, H2OConfig, H2OKVCache, QuantizedH2OKVCache, use_backend
from mlx_h2o.caches.cache import evicting_cache
from mlx_h2o.caches.frame import Frame

SCALE = 0.2
HEADS, GROUP = 2, 2
SIZES = [(32, 32), (64, 64), (80, 80), (96, 64), (64, 128), (8, 256)]


def rows(length: int, size: int, *, seed: int = 0, heads: int = HEADS, batch: int = 1) -> mx.array:
    rng = np.random.default_rng([seed, length, size, heads])
    return mx.array(rng.standard_normal((batch, heads, length, size)).astype(np.float32))


def with_a_small_one(values: mx.array) -> mx.array:
    """``values`` whose first one is small in the first head, as that of an attention sink."""
    values[:, 0, 0] *= 0.1
    return values


def new_cache(policy: str = "window", **given) -> QuantizedH2OKVCache:
    settings = {"max_kv_size": None, "policy": policy, "kv_bits": 8, "kv_group_size": 32}
    return QuantizedH2OKVCache(H2OConfig.of(**settings | given), name="tiny layer 0")


def step(cache, queries, keys, values, **given) -> mx.array:
    mask = cache.make_mask(queries.shape[2])
    found = cache.update_and_fetch(keys, values)
    return cache.attend(queries, *found, scale=SCALE, mask=mask, **given)


def true_rows(cache) -> list[np.ndarray]:
    """Keys and values as they came but for their codes, by the slow reference."""
    frame, found = cache._table.frame, []
    sides = zip((cache.keys, cache.values), frame.sizes, strict=True)
    for side, ((words, scales, biases), size) in enumerate(sides):
        bits = words.shape[3] * 32 // (scales.shape[3] * 32)
        kept = mx.dequantize(words, scales, biases, group_size=32, bits=bits)
        kept = np.array(kept.astype(mx.float32), np.float64)
        turned = (kept @ reference_frame.matrix(kept.shape[3]))[..., :size]
        found.append(turned + np.array(frame.centres[side].astype(mx.float32)))
    return found


@pytest.mark.parametrize("size", [8, 32, 64, 80, 96, 128, 192, 256])
def test_rows_are_moved_and_rotated_and_come_back(size):
    keys, values = rows(70, size), with_a_small_one(rows(70, size, seed=1) + 3)
    frame = Frame.of(keys, values)
    centre, sink = map(np.array, frame.centres)
    rounding = {"rtol": 2**-7, "atol": 1e-6}  # to 8 bits, of a sum in float32
    expected = reference_frame.centres(np.array(keys), np.array(values))
    np.testing.assert_allclose(centre, expected[0], **rounding)
    np.testing.assert_array_equal(sink, expected[1])
    assert sink[0, 0].any() and not sink[0, 1].any()
    kept = frame.into(keys, values)
    came = np.array(keys, np.float64) - centre, np.array(values, np.float64) - sink
    for side, (found, moved) in enumerate(zip(kept, came, strict=True)):
        expected = reference_frame.padded(moved)
        expected = expected @ reference_frame.matrix(expected.shape[3])
        np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=2e-5)
        np.testing.assert_allclose(
            np.array(frame.back(found, side)), np.array((keys, values)[side]), rtol=0, atol=2e-5
        )


@pytest.mark.parametrize("policy", ["window", "h2o-ema", "h2o-sum", "h2o"])
@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 2.0, 4.0]])
@pytest.mark.parametrize(("size", "value_size"), SIZES)
def test_attention_is_that_over_the_true_rows(size, value_size, sinks, policy):
    """The output, and the scores that a policy gets."""
    cache, scores = new_cache(policy), np.zeros((1, HEADS, 0))
    sinks = None if sinks is None else mx.array(sinks)
    bias = 4 * rows(1, size, seed=9)
    for index, length in enumerate((8, 1, 4, 1)):
        keys, values = rows(length, size, seed=index) + bias, rows(length, value_size, seed=index)
        values = values if index else with_a_small_one(values)
        queries = rows(length, size, seed=index, heads=HEADS * GROUP)
        out = step(cache, queries, keys, values, sinks=sinks)
        own = true_rows(cache)
        seen = reference.attention(queries, *own, scale=SCALE, mask="causal", sinks=sinks)
        np.testing.assert_allclose(np.array(out), seen.out, rtol=0, atol=3e-5)
        assert out.shape[3] == value_size
        if policy == "window":
            continue
        before = np.pad(scores, ((0, 0), (0, 0), (0, length)), constant_values=np.nan)
        scores = np.array(cache.scores)
        if policy == "h2o-ema":
            expected = reference.accumulate(before, seen.scores, decay=0.95)
        else:
            mass = reference.attention_mass(seen.scores, seen.lse, HEADS)
            expected = np.nan_to_num(before) + mass
        np.testing.assert_allclose(scores, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_halves(dtype, backend):
    cache = new_cache("h2o-ema")
    for index, length in enumerate((8, 1, 3)):
        keys, values = (rows(length, 64, seed=3 * index + part).astype(dtype) for part in (0, 1))
        queries = rows(length, 64, seed=index, heads=4).astype(dtype)
        with use_backend(backend):
            out = step(cache, queries, keys + 10, values)
        assert out.dtype == dtype
        queries = np.array(queries.astype(mx.float32))
        expected = reference.attention(queries, *true_rows(cache), scale=SCALE, mask="causal")
        wrong = np.abs(np.array(out.astype(mx.float32)) - expected.out).max()
        assert wrong < (0.005 if dtype == mx.float16 else 0.04)


def error_of(bits: int, shift: mx.array | float, framed: bool) -> float:
    """Error of the output over 70 packed rows whose keys are moved by ``shift``."""
    cache = new_cache(kv_bits=bits, v_bits=8, kv_frame=framed)
    keys, values, queries = rows(78, 64), rows(78, 64, seed=1), rows(8, 64, heads=4)
    cache.update_and_fetch(keys[:, :, :70] + shift, values[:, :, :70])
    out = step(cache, queries, keys[:, :, 70:] + shift, values[:, :, 70:])
    # Keys that are all moved change no softmax.
    expected = reference.attention(queries, keys, values, scale=SCALE, mask="causal").out
    return float(np.sqrt(np.mean((np.array(out) - expected) ** 2)))


@pytest.mark.parametrize("bits", [3, 4, 5, 8])
def test_keys_with_a_bias_lose_no_more_than_those_without(bits):
    """A few large elements that all keys of a head share, as a bias of their projection makes."""
    shift = mx.zeros((HEADS, 1, 64))
    shift[0, 0, 3], shift[0, 0, 40], shift[1, 0, 17] = 60.0, -25.0, 10.0
    without, with_bias = error_of(bits, 0.0, True), error_of(bits, shift, True)
    assert with_bias < 1.25 * without
    assert error_of(bits, shift, False) > 3 * with_bias


@pytest.mark.parametrize("v_bits", [3, 4])
def test_the_value_of_a_sink_is_as_it_came(v_bits):
    cache, values = new_cache(v_bits=v_bits, dense_size=0), with_a_small_one(rows(9, 64))
    cache.update_and_fetch(rows(9, 64), values)
    wrong = np.abs(true_rows(cache)[1] - np.array(values))[0, 0]
    assert wrong[0].max() < 2**-9 < 0.02 < wrong[1:].max(axis=1).min()


def test_a_state_of_earlier_versions_has_no_centre_of_values():
    cache = new_cache()
    cache.update_and_fetch(rows(9, 32) + 7, rows(9, 32, seed=1))
    keys, values, *others = cache.state
    older = QuantizedH2OKVCache.from_state([keys, values[:3], *others])
    assert not _centre_of(older)[..., 32:].any()
    check_same_rows(older, cache)


def test_a_line_without_rows_starts_a_frame_of_its_own():
    """All tokens taken back, and those of another text come."""
    cache, other = new_cache(), new_cache()
    step(cache, rows(8, 32, heads=4), rows(8, 32) + 5, rows(8, 32))
    assert cache.trim(8) == 8
    values = with_a_small_one(rows(3, 32))
    for one in (cache, other):
        step(one, rows(3, 32, heads=4), rows(3, 32) - 5, values)
        step(one, rows(1, 32, heads=4), rows(1, 32) + 90, rows(1, 32))  # too late for the frame
    np.testing.assert_array_equal(_centre_of(cache), _centre_of(other))
    np.testing.assert_array_equal(_centre_of(other), _centres(rows(3, 32) - 5, values))
    check_same_rows(cache, other)


def _centre_of(cache) -> np.ndarray:
    """The centres of keys and values, one after the other."""
    return np.concatenate([*map(np.array, cache._table.frame.centres)], axis=3)


def _centres(keys: mx.array, values: mx.array) -> np.ndarray:
    return np.concatenate(reference_frame.centres(np.array(keys), np.array(values)), axis=3)


def test_sequences_of_a_batch_have_frames_of_their_own():
    alone = [new_cache() for _ in range(3)]
    for number, cache in enumerate(alone[:2]):
        keys = rows(8 + number, 32, seed=number) + 20 * number
        cache.update_and_fetch(keys, with_a_small_one(rows(8 + number, 32, seed=5)))
    centres = [_centre_of(cache) for cache in alone[:2]]
    batch = H2OKVCache.merge(alone)  # the third has no rows yet
    batch.prepare(lengths=[1, 2, 4], right_padding=[3, 2, 0])
    keys = mx.concatenate([rows(4, 32, seed=n) + 20 * n for n in (7, 8, 9)])
    values = with_a_small_one(keys[...])
    batch.update_and_fetch(keys, values)
    batch.finalize()
    centres.append(_centres(keys[2:], values[2:]))
    np.testing.assert_array_equal(_centre_of(batch), np.concatenate(centres))
    batch.filter([2, 0])
    np.testing.assert_array_equal(_centre_of(batch), np.concatenate([centres[2], centres[0]]))
    np.testing.assert_array_equal(_centre_of(batch.extract(0)), centres[2])
    assert isinstance(batch, BatchH2OKVCache)


@pytest.mark.parametrize("size", [32, 80])
def test_rows_on_a_prefix_are_in_its_frame(size):
    alone, cache = new_cache(), new_cache(max_kv_size=40, prefix_size=12)
    for one in (alone, cache):
        one.update_and_fetch(rows(12, size) + 7, with_a_small_one(rows(12, size, seed=1)))
    cache.share(12)  # which are all its rows
    restored = QuantizedH2OKVCache.from_state(cache.state)
    batch = H2OKVCache.merge([copy.deepcopy(cache), copy.deepcopy(cache)])
    queries, new = rows(2, size, heads=4), rows(2, size, seed=4)
    expected = np.array(step(alone, queries, new, new))
    for one in (cache, restored, batch):
        own = [mx.concatenate([a, a]) if one is batch else a for a in (queries, new, new)]
        out = np.array(step(one, *own))
        assert (_centre_of(one) == _centre_of(alone)).all()  # of each sequence
        np.testing.assert_allclose(out[:1], expected, rtol=0, atol=2e-5)
    for one in (cache.unshared(), batch.extract(1).unshared()):
        check_same_rows(one, alone)


def test_a_state_that_names_no_frame_is_of_plain_rows():
    """As that of versions which knew of no frames."""
    cache = new_cache(kv_frame=False)
    cache.update_and_fetch(rows(9, 32), rows(9, 32))
    latents: dict[str, Any] = {"kv_bits": 8, "kv_handed": "latents"}
    settings = ({}, {"kv_format": "turbo3"}, latents)
    configs = [H2OConfig.of(policy="window", **given) for given in settings]
    caches = [cache, *map(evicting_cache, configs)]
    for one, config in zip(caches, (cache.config, *configs), strict=True):
        assert "kv_frame" not in json.loads(one.state[8])
        loaded = type(one).from_state(one.state)
        assert loaded.config == config and not loaded.config.framed
        assert loaded._table.frame is None


NOTICES: dict[str, Callable[[], None]] = {
    "attention": lambda: test_attention_is_that_over_the_true_rows(64, 64, None, "h2o-ema"),
    "rows": lambda: test_rows_are_moved_and_rotated_and_come_back(64),
}
"""Checks that seeded faults fail."""
