"""QuantizedH2OKVCache: each row is packed once, moved in packed form, and handed out as stored."""

import warnings
from dataclasses import replace
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
import reference_frame
from cache_columns import SIZE, new_cache
from cache_courses import SMALL, Course
from cache_invariants import arrays_of
from mlx_h2o import Affine, H2OConfig, QuantizedH2OKVCache, policies
from mlx_h2o.caches import formats
from mlx_h2o.operations.backends import resolve
from models import tiny

WIDTHS = [(8, None), (4, None), (8, 4), (3, 6), (2, None)]


def packed_cache(policy="h2o-ema", **given) -> QuantizedH2OKVCache:
    chosen = SMALL | {"policy": policy, "kv_bits": 8, "kv_group_size": SIZE} | given
    return QuantizedH2OKVCache(H2OConfig.of(**chosen), name="tiny layer 0")


@pytest.mark.matrix(5)
@pytest.mark.parametrize(("bits", "v_bits"), WIDTHS)
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff", "h2o"])
def test_any_bits(policy, bits, v_bits):
    course = Course("8 bits", policy, kv_bits=bits, v_bits=v_bits, evict_every=4)
    for length in (20, 1, 1, 1, 9, 1, 3, 1, 1, 1, 1):
        course.chunk(length)


@pytest.mark.parametrize("batch", [None, 2])
def test_the_codes_are_those_of_the_rows_as_they_came(batch):
    """After chunks, evictions and moves: bit by bit what packing them once in their frame gives."""
    course = Course("K8 V4", batch=batch, evict_every=4)
    course.chunk(20)
    course.tokens(9)
    cache = course.cache if batch is None else course.cache.extract(1)
    came = course.sequences[-1].came
    positions = np.array(cache.positions)[0][..., None]
    centres = reference_frame.centres(*(rows[:, :20] for rows in came))
    sides = (cache.keys, cache.values), came, (8, 4), centres
    for stored, rows, bits, centre in zip(*sides, strict=True):
        kept = reference_frame.kept(rows, centre)
        expected = mx.quantize(mx.array(kept), group_size=SIZE, bits=bits)
        for part, whole in zip(stored, expected, strict=True):
            found = np.take_along_axis(np.array(whole), positions, axis=1)
            np.testing.assert_array_equal(np.array(part)[0], found)


@pytest.mark.parametrize("policy", ["h2o-ema", "window", "random"])
def test_evicting_packs_and_unpacks_nothing(policy, monkeypatch):
    course = Course("4 bits", policy)
    course.chunk(30)
    cache = course.cache
    refuse = Mock(side_effect=AssertionError("rows were packed or unpacked"))
    for operation in ("quantize", "dequantize"):
        monkeypatch.setattr(mx, operation, refuse)
    for operation in ("quantize_append", "segment_rows"):
        monkeypatch.setattr(resolve(), operation, refuse)
    cache.flush()
    mx.eval(arrays_of(cache.state))
    with pytest.raises(AssertionError, match="packed or unpacked"):
        cache.update_and_fetch(*[mx.ones((1, 2, 2, SIZE))] * 2)


@pytest.mark.parametrize("length", [1, 8, 9])
def test_up_to_8_tokens_rows_are_handed_out_packed(length):
    course = Course("8 bits")
    course.tokens(20)
    cache = course.cache
    _, keys, values = (part[None] for part in course.sequences[0].next(length))
    k, v = cache.update_and_fetch(mx.array(keys), mx.array(values))
    packed = length <= 8
    assert isinstance(k, tuple) == isinstance(v, tuple) == packed
    assert cache.group_size == SIZE
    if packed:
        with pytest.raises(ValueError, match=r"tiny layer 0 keeps its rows in a frame"):
            _ = cache.bits  # for which mlx_lm's attention asks
        assert [part.shape[2] for part in (*k, *v)] == [cache.positions.shape[2]] * 6
    else:
        assert not hasattr(cache, "bits")
        for rows, new in ((k, keys), (v, values)):
            np.testing.assert_array_equal(np.array(rows)[0, :, -length:], new[0])
    again, _ = cache.keys_and_values()
    assert isinstance(again, tuple) == packed


def test_an_array_is_handed_out_where_a_model_computes_with_keys():
    for length, policy in ((1, "h2o-ema"), (8, "snapkv"), (9, "h2o-ema")):
        course = Course("arrays", policy, sparse_v=0.3)  # which is of packed rows
        course.chunk(length)
        k, v = course.cache.keys_and_values()
        assert isinstance(k, mx.array) and isinstance(v, mx.array)


@pytest.mark.parametrize(("bits", "v_bits"), WIDTHS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_nbytes_counts_every_array(bits, v_bits, dtype):
    cache = packed_cache("window", kv_bits=bits, v_bits=v_bits, evict_every=1)
    token = mx.random.normal((1, 2, 1, 2 * SIZE)).astype(dtype)
    for _ in range(20):
        cache.update_and_fetch(token, token)
    groups = 2 * 2 * dtype.size  # of each group a scale and a bias
    row = 2 * SIZE * bits // 8 + 2 * SIZE * (v_bits or bits) // 8 + 2 * groups
    # And positions, but for the newest row, whose place is known; the policy wants no scores.
    centres = 2 * 2 * SIZE * dtype.size
    assert cache.nbytes == 2 * (14 * row + 13 * 4 + centres)


def test_latents_are_packed_and_rotary_parts_are_not():
    model = tiny.build("deepseek_v3", num_hidden_layers=1)
    (cache,) = mlx_h2o.make_prompt_cache(model, 20, kv_bits=4, kv_group_size=32)
    with mlx_h2o.routing(model):
        mx.eval(model(mx.arange(12)[None], cache=[cache]))
    words, scales, _ = cache.keys
    assert (words.dtype, words.shape[-1]) == (mx.uint32, 64 * 4 // 32)
    assert scales.shape[-1] == 64 // 32
    assert (cache.values.dtype, cache.values.shape[-1]) == (mx.float32, 32)
    assert isinstance(QuantizedH2OKVCache.from_state(cache.state).keys_and_values()[0], tuple)


def test_on_a_gpu_mlx_unpacks_rows(monkeypatch):
    column = formats.AffineColumn(4, 32)
    parts = column.encode(mx.random.normal((1, 2, 5, 64)))
    expected = column.decode(parts)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert mx.allclose(column.decode(parts), expected, atol=1e-6).item()
    assert column.decode(tuple(part[:, :, :0] for part in parts)).shape == (1, 2, 0, 64)


# Sizes of groups


def test_a_width_that_the_group_does_not_divide_takes_32_and_says_so_once(monkeypatch):
    monkeypatch.setattr(formats, "_warned", set())
    rows = mx.random.normal((1, 1, 1, 96))
    first, second = (packed_cache("window", kv_group_size=64) for _ in range(2))
    with pytest.warns(UserWarning, match=r"96.*kv_group_size = 64 does not divide: groups of 32"):
        first.update_and_fetch(rows, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.update_and_fetch(rows, rows)
        assert (first.group_size, second.group_size) == (32, 32)
        assert QuantizedH2OKVCache.from_state(second.state).group_size == 32
        assert second.to_quantized(group_size=64, bits=8) is second


@pytest.mark.parametrize("given", [{}, {"light_bits": 4}])
def test_a_width_that_no_group_divides_is_refused_and_nothing_is_done(given):
    cache = packed_cache("window", kv_group_size=64, kv_frame=False, **given)
    rows = mx.zeros((1, 1, 1, 80))
    with pytest.raises(ValueError, match=r"tiny layer 0 has keys of 80.*neither .*64 nor 32"):
        cache.update_and_fetch(rows, rows)
    assert cache.empty() and cache.offset == 0


def test_an_empty_one_has_8_bits():
    assert (QuantizedH2OKVCache().bits, QuantizedH2OKVCache().group_size) == (8, 64)


# to_quantized


@pytest.mark.matrix(10)
@pytest.mark.parametrize("policy", policies.names())
@pytest.mark.parametrize("tokens", [0, 10, 40])
def test_to_quantized_goes_on_with_the_same_rows(policy, tokens):
    course = Course("dense", policy, evict_every=4)
    course.tokens(tokens)
    dense = course.cache
    packed = dense.to_quantized(group_size=32, bits=4)
    assert type(packed) is QuantizedH2OKVCache
    assert packed.config == replace(dense.config, format=Affine(4, kv_group_size=32))
    assert (packed.offset, packed.evicted, packed.name) == (tokens, dense.evicted, dense.name)
    assert packed.to_quantized(group_size=32, bits=4) is packed
    with pytest.raises(ValueError, match=r"bits 8, expected 32 and 4 as .*tiny layer 0"):
        packed.to_quantized(group_size=32, bits=8)
    course.check()  # the dense one is as it was
    with pytest.raises(ValueError, match="found a batch, expected one sequence"):
        dense.merge([dense]).to_quantized(group_size=32, bits=4)
    other = Course("dense", policy)
    other.tokens(3)
    other.cache.trim(3)
    assert other.cache.to_quantized(group_size=32, bits=4).empty()
    if tokens:
        came = np.array(dense.keys)
        kept = reference_frame.kept(came, reference_frame.centre(came))
        expected = mx.quantize(mx.array(kept), group_size=32, bits=4)
        for one, other in zip(packed.keys, expected, strict=True):
            np.testing.assert_array_equal(np.array(one), np.array(other))
        for name in ("scores", "positions"):
            found, before = (np.array(getattr(one, name)) for one in (packed, dense))
            np.testing.assert_array_equal(found, before)
    assert type(new_cache(packed.config)) is type(packed)
    for length in (1, 3, 9, 1):
        packed.update_and_fetch(*[mx.ones((1, 2, length, SIZE))] * 2)
        packed.update_scores(mx.ones((1, 4, length, packed.positions.shape[2])))
    assert packed.offset == tokens + 14
