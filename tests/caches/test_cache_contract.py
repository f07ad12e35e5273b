"""H2OKVCache: the members that mlx_lm needs in a cache, masks, and errors."""

import copy
from operator import attrgetter

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from cache_checks import filled, random_tokens, rows_by_position, small, step
from cache_columns import COLUMNS, SIZE, new_cache
from cache_courses import Course
from cache_invariants import check_same, seen_from_outside
from mlx_h2o import H2OConfig, H2OKVCache, QuantizedH2OKVCache, policies

POLICIES = policies.names()
LOOKS = [H2OKVCache.flush, H2OKVCache.size, attrgetter("state"), attrgetter("nbytes")]


@pytest.mark.parametrize("column", COLUMNS)
def test_an_empty_cache(column):
    cache = Course(column).cache
    assert cache.empty() and bool(cache)
    assert (cache.size(), cache.nbytes, cache.offset, cache.evicted) == (0, 0, 0, 0)
    assert (cache.keys, cache.values, cache.scores, cache.positions) == (None,) * 4
    assert cache.is_trimmable()
    assert cache.trim(3) == 0
    cache.flush()
    assert cache.make_mask(3, return_array=True).tolist() == np.tri(3, dtype=bool).tolist()
    again = type(cache).from_state(cache.state)
    assert again.empty()
    assert again.config == cache.config
    with pytest.raises(ValueError, match=r"\[H2OKVCache.keys_and_values\] there are no rows"):
        cache.keys_and_values()


def test_what_mlx_lm_takes_for_something_else_is_not_there():
    for name in ("bits", "group_size", "__len__"):
        assert not hasattr(H2OKVCache(), name)


def test_each_class_takes_its_own_settings():
    with pytest.raises(ValueError, match=r"\[H2OKVCache\] kv_bits is 8, expected None"):
        H2OKVCache(H2OConfig.of(kv_bits=8))
    with pytest.raises(ValueError, match=r"\[QuantizedH2OKVCache\] kv_bits is None, expected a"):
        QuantizedH2OKVCache(H2OConfig())


# The surplus of a chunk


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("column", ["dense", "8 bits", "8 and 4"])
def test_who_looks_lets_the_surplus_go(column, look):
    course = Course(column)
    course.chunk(31)  # an odd number: nobody has looked
    cache = course.cache
    assert not cache.is_trimmable()
    assert cache.positions.shape[2] == 31
    waiting = cache.held_nbytes
    look(cache)
    assert (cache.positions.shape[2], cache.evicted) == (14, 17)
    assert cache.held_nbytes == cache.nbytes < waiting
    seen = seen_from_outside(cache)
    look(cache)  # a second time there is nothing to do
    check_same(seen, seen_from_outside(cache))
    course.check()
    assert not cache.is_trimmable()


@pytest.mark.parametrize("how", ["copy", "state", "update", "merge", "to_quantized"])
def test_the_surplus_goes_at_the_first_occasion(how):
    course = Course()
    course.chunk(31)
    if how == "update":
        course.chunk(1)
        return
    cache = course.cache
    if how == "copy":
        found = copy.deepcopy(cache)
    elif how == "state":
        found = H2OKVCache.from_state(cache.state)
    elif how == "merge":
        found = H2OKVCache.merge([cache])
    else:
        found = cache.to_quantized(32, 8)
    assert found.size() == 14
    course.flush()
    assert rows_by_position(found)[0] == rows_by_position(cache)[0]


# Masks


def test_masks_fit_what_the_update_returns():
    cache, rng = filled()
    assert cache.make_mask(1) is None
    assert cache.make_mask(1, return_array=True) is None
    assert cache.make_mask(4) == "causal"
    for length in (2, 30, 3, 1, 5):
        mask = cache.make_mask(length, return_array=True)
        keys = mx.array(random_tokens(rng, length)[1])
        stored, _ = cache.update_and_fetch(keys, keys)
        rows = stored.shape[2]
        cache.update_scores(mx.ones((2, 4, length, rows)))
        if length > 1:
            assert mask.shape == (length, rows)
            assert mask.sum(axis=1).tolist() == [*range(rows - length + 1, rows + 1)]


def test_a_window_is_refused():
    said = r"\[H2OKVCache.make_mask\] window_size is 8.*tiny layer 0"
    with pytest.raises(ValueError, match=said):
        small().make_mask(4, window_size=8)


# Trims


def test_trim_takes_at_most_all():
    cache, rng = filled(tokens=5)
    assert cache.trim(np.int64(9)) == 5  # as NumPy counts them too
    assert (cache.size(), cache.offset) == (0, 0)
    step(cache, *random_tokens(rng, 3))
    assert np.array(cache.positions)[0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("tokens", [17, 40])
def test_trim_after_an_eviction_is_an_error(tokens):
    cache, _ = filled(tokens=tokens)
    assert not cache.is_trimmable()
    with pytest.raises(ValueError, match=r"\[H2OKVCache.trim\].*tiny layer 0 has evicted rows"):
        cache.trim(1)


# What is handed out, and what may be set


@pytest.mark.matrix(4)
@pytest.mark.parametrize("column", COLUMNS)
def test_what_was_handed_out_does_not_change(column):
    course = Course(column)
    course.tokens(20)
    cache = course.cache
    arrays = [cache.keys, cache.values, cache.scores, cache.positions, cache.state[:4]]
    held = [array for _, array in tree_flatten(arrays)]
    before = [np.array(array) for array in held]
    for length in (1, 1, 9, 1, 1):
        course.chunk(length)
    for array, expected in zip(held, before, strict=True):
        np.testing.assert_array_equal(np.array(array), expected)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("column", COLUMNS)
def test_keys_and_values_may_be_set(column):
    """As mlx_lm's pipelines do, to make others wait for something."""
    course = Course(column, "window")
    course.tokens(10)
    cache = course.cache

    def waiting(rows):
        if isinstance(rows, mx.array):
            return mx.depends(rows, mx.zeros((1,)))
        return type(rows)(mx.depends(part, mx.zeros((1,))) for part in rows)

    cache.keys, cache.values = waiting(cache.keys), waiting(cache.values)
    course.check()
    course.tokens(8)
    with pytest.raises(ValueError, match=r"\[H2OKVCache.keys\] found .*expected"):
        cache.keys = mx.zeros((1, 2, 3, SIZE))
    with pytest.raises(ValueError, match=r"\[H2OKVCache.values\].*no rows are stored"):
        new_cache(course.config).values = mx.zeros((1, 1, 1, 4))


def test_keys_that_are_set_are_ranked_anew():
    cache, _ = filled("keydiff", tokens=16)
    rng = np.random.default_rng(2)
    cache.keys = mx.array(rng.standard_normal((2, 2, 16, 16)).astype(np.float32))
    twin = H2OKVCache.from_state(cache.state)
    token = random_tokens(rng, 1)
    for one in (cache, twin):
        step(one, *token)
    assert rows_by_position(cache)[0] == rows_by_position(twin)[0]


# Rows that do not fit


def test_dtypes_are_kept():
    for dtype in (mx.float16, mx.bfloat16):
        cache = small("window")
        keys = mx.zeros((1, 1, 1, 4), dtype)
        for _ in range(20):
            stored = cache.update_and_fetch(keys, mx.zeros((1, 1, 1, 6), dtype))
        assert [a.dtype for a in stored] == [dtype, dtype]
        assert [a.shape for a in stored] == [(1, 1, 16, 4), (1, 1, 16, 6)]
        assert cache.scores.dtype == mx.float32
        assert cache.positions.dtype == mx.int32


@pytest.mark.parametrize(
    ("keys", "values", "text"),
    [
        ((1, 2, 8), (1, 2, 8), "expected [B, H, L, D]"),
        ((1, 2, 1, 8), (1, 2, 2, 8), "keys have shape (1, 2, 1, 8), values (1, 2, 2, 8)"),
        ((1, 2, 0, 8), (1, 2, 0, 8), "expected B, H, L of at least 1"),
        ((1, 3, 1, 16), (1, 3, 1, 16), "H = 3, row size 16, expected"),
        ((2, 2, 1, 8), (2, 2, 1, 16), "row size 8, expected"),
        ((2, 2, 1, 16), (2, 2, 1, 8), "values are mlx.core.float32"),
    ],
)
def test_rows_that_do_not_fit(keys, values, text):
    cache, _ = filled(tokens=3)
    with pytest.raises(ValueError, match=r"^\[H2OKVCache.update_and_fetch\]") as error:
        cache.update_and_fetch(mx.zeros(keys), mx.zeros(values))
    assert text in str(error.value)
    assert cache.offset == 3


def test_rows_of_another_dtype():
    cache, _ = filled(tokens=3)
    keys = mx.zeros((2, 2, 1, 16), mx.float16)
    with pytest.raises(ValueError, match="keys are mlx.core.float16.*as the stored rows"):
        cache.update_and_fetch(keys, keys)
    packed = Course("8 bits").cache
    packed.update_and_fetch(*[mx.zeros((1, 2, 1, SIZE))] * 2)
    for shape, dtype in (((1, 2, 1, SIZE), mx.float16), ((1, 2, 1, 2 * SIZE), mx.float32)):
        with pytest.raises(ValueError, match="as the stored rows"):
            packed.update_and_fetch(mx.zeros(shape, dtype), mx.zeros(shape, dtype))
    assert packed.offset == 1
