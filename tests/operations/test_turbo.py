"""Rows as codes of rotated directions: the format, attention over them, and refusals."""

import copy

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
import reference_turbo
from mlx_h2o import H2OConfig, H2OKVCache, demo, fast
from mlx_h2o.caches.formats import TurboColumn
from mlx_h2o.config import KV_FORMATS
from mlx_h2o.operations.arguments import CODE_BITS
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.composed.buffers import packed as packed_rows

SIZES = (32, 64, 128, 256, 512, 1024)


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


# The format


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("size", SIZES)
def test_levels_are_those_of_the_density(size, bits):
    found = np.array(turbo.levels(size, bits))
    np.testing.assert_allclose(found, reference_turbo.levels(size, bits), rtol=0, atol=2e-8)
    assert (found == -found[::-1]).all()
    if (size, bits) in reference_turbo.MERGED:
        half = found[2 ** (bits - 1) :]
        np.testing.assert_allclose(half, reference_turbo.MERGED[size, bits], rtol=0, atol=2.2e-4)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize(
    ("size", "dtype"), [(32, mx.float32), (128, mx.float16), (256, mx.bfloat16), (1024, mx.float32)]
)
def test_rows_are_packed_as_the_format_says(size, dtype, bits, side, backend):
    given = normal(size + bits, 2, 3, 5, size, dtype=dtype) * mx.array([1e-3, 1, 40]).reshape(
        1, 3, 1, 1
    ).astype(dtype)
    words, norms = resolve().encode_rows(given, bits, reference_turbo.SEEDS[side])
    assert words.shape == (2, 3, 5, size * bits // 32)
    assert words.dtype == mx.uint32
    assert norms.shape == (2, 3, 5, 1)
    assert norms.dtype == mx.float32
    reference_turbo.check_packed(words, norms, given, bits=bits, side=side)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_a_row_of_zeros_stays_one(bits, backend):
    column = TurboColumn(bits, turbo.KEYS, mx.float32)
    found = column.decode(column.encode(mx.zeros((1, 1, 2, 64))))
    assert (np.array(found) == 0).all()


@pytest.mark.parametrize("bits", CODE_BITS)
def test_no_rows_stay_none(bits, backend):
    column = TurboColumn(bits, turbo.VALUES, mx.float16)
    words, norms = column.encode(mx.zeros((2, 3, 0, 64), mx.float16))
    assert (words.shape, norms.shape) == ((2, 3, 0, 2 * bits), (2, 3, 0, 1))
    found = column.decode((words, norms))
    assert (found.shape, found.dtype) == ((2, 3, 0, 64), mx.float16)
    mx.eval(words, norms, found)


def test_a_row_whose_squares_are_infinite_is_infinite(backend):
    rows = mx.array([1e18, 1e20]).reshape(1, 1, 2, 1) * mx.ones((1, 1, 2, 32))
    _, norms = resolve().encode_rows(rows, 4, turbo.KEYS)
    assert np.isinf(norms).ravel().tolist() == [False, True]


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_new_rows_go_to_their_slots_in_memory_of_their_own(kv_format, backend):
    bits, v_bits = KV_FORMATS[kv_format]
    rows = [normal(place, 2, 2, 6, size) for place, size in ((1, 64), (2, 128))]

    def stored(rows: mx.array, width: int, seed: int) -> list[mx.array]:
        return list(packed_rows(rows, {0: 1, 8: 3}.get(width, 2), width, 64, seed))

    both = stored(rows[0], bits, turbo.KEYS), stored(rows[1], v_bits, turbo.VALUES)
    empty = [[mx.zeros_like(part) for part in parts] for parts in both]
    start, given = 0, []
    for count in (2, 1, 3):
        new = [array[:, :, start : start + count] for array in rows]
        slots = mx.broadcast_to(mx.arange(start, start + count, dtype=mx.uint32), (2, 2, count))
        empty = fast.quantize_append(*empty, *new, slots, bits=bits or 8, v_bits=v_bits)
        start += count
        given = [part[:, :, :start] for parts in empty for part in parts]
        assert all(part.shape[2] == start for part in given)
    for part, expected in zip(given, [*both[0], *both[1]], strict=True):
        if part.dtype == mx.uint32:  # a code at the border of two levels may be the other one
            assert np.mean(np.array(part) != np.array(expected)) < 0.02
        else:
            np.testing.assert_allclose(np.array(part), np.array(expected), rtol=1e-6)


# Caches of them


@pytest.mark.parametrize(("size", "v_size"), [(48, 64), (64, 16), (33, 64), (2048, 64)])
def test_sizes_that_are_refused_are_named(size, v_size):
    cache = H2OKVCache(H2OConfig.of(kv_format="turbo3"), name="tiny layer 3")
    wrong = size if size != 64 else v_size
    with pytest.raises(ValueError, match=f"tiny layer 3 has .* of {wrong} elements.*power of two"):
        cache.update_and_fetch(mx.zeros((1, 1, 1, size)), mx.zeros((1, 1, 1, v_size)))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_rows_come_back_in_their_dtype_from_files_and_copies(tmp_path, dtype):
    cache = H2OKVCache(H2OConfig.of(max_kv_size=64, kv_format="turbo4", policy="window"))
    cache.update_and_fetch(
        normal(1, 1, 2, 30, 64, dtype=dtype), normal(2, 1, 2, 30, 32, dtype=dtype)
    )
    file = str(tmp_path / "rows.safetensors")
    mlx_h2o.save_prompt_cache(file, [cache])
    (read,) = mlx_h2o.load_prompt_cache(file)
    new = normal(3, 1, 2, 12, 64, dtype=dtype), normal(4, 1, 2, 12, 32, dtype=dtype)
    expected = [
        np.array(rows.astype(mx.float32)) for rows in copy.deepcopy(cache).update_and_fetch(*new)
    ]
    for rows, own in zip(read.update_and_fetch(*new), expected, strict=True):
        assert rows.dtype == dtype
        np.testing.assert_array_equal(np.array(rows.astype(mx.float32)), own)


# In a model


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("kv_format", ["turbo4", "turbo8v3", "turbo0v3"])
def test_a_model_generates_from_codes(kv_format):
    model, tokenizer = mlx_h2o.load("demo")
    prompt = demo.text()[:400]
    settings = {"max_kv_size": None, "policy": "window"}
    answers = []
    for more in ({}, {"kv_format": kv_format}):
        cache = mlx_h2o.make_prompt_cache(model, H2OConfig.of(**settings, **more))
        answers.append(mlx_h2o.generate(model, tokenizer, prompt, max_tokens=8, prompt_cache=cache))
    assert cache[0].config.kv_format == kv_format
    assert answers[1][:4] == answers[0][:4]


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["turbo3", "turbo8v3", "turbo0v3"])
def test_outside_of_routing_the_remedy_is_named(kv_format):
    model, _ = mlx_h2o.load("demo")
    cache = mlx_h2o.make_prompt_cache(model, 64, kv_format=kv_format, layers="equal")
    mx.eval(model(mx.arange(20)[None], cache=cache))  # a chunk's rows are unpacked for it
    with pytest.raises(ValueError, match=rf"{kv_format}.*call the model within mlx_h2o\.routing"):
        model(mx.array([[1]]), cache=cache)
    with mlx_h2o.routing(model):
        mx.eval(model(mx.array([[1]]), cache=cache))
    with pytest.raises(AttributeError):
        _ = H2OKVCache(H2OConfig()).bits
