"""Batches: masks, bytes, that joining and leaving do not affect others, and what is refused."""

import copy
import json

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache
import numpy as np
import pytest

from cache_checks import rows_by_position, small
from cache_columns import COLUMNS, SIZE, new_cache
from cache_courses import HEADS, Course
from cache_invariants import arrays_of
from mlx_h2o import BatchH2OKVCache, H2OKVCache, QuantizedH2OKVCache

KINDS = ("dense", "8 bits", "8 and 4")


def test_a_state_that_tells_less_of_some_sequences_is_refused():
    state = [*BatchH2OKVCache(batch_size=2).state]
    state[6] = json.dumps(json.loads(state[6]) | {"remaining": [None]})
    with pytest.raises(ValueError, match="shorter"):
        BatchH2OKVCache.from_state(state)


@pytest.mark.parametrize("column", KINDS)
def test_the_mask_shows_each_sequence_its_own_rows(column):
    """A query sees the rows of its sequence up to itself; padding sees something."""
    course = Course(column, batch=3)
    course.prompts([3, 1, 40])
    course.tokens(2)
    course.cache.prepare(lengths=[1, 2, 2], right_padding=[1, 0, 0])
    mask = course.cache.make_mask(2)
    before = course.cache.size()
    own = [sequence.next(2) for sequence in course.sequences]
    cache = course.cache
    cache.update_and_fetch(*(mx.array(np.stack(part)) for part in list(zip(*own, strict=True))[1:]))
    positions, found = np.array(cache.positions)[:, 0], np.array(mask)
    assert found.shape == (3, 1, 2, positions.shape[1])
    assert positions.shape[1] >= before
    for b, offset in enumerate([5, 3, 42]):
        for query in range(1 if b == 0 else 2):
            seen = positions[b][found[b, 0, query]]
            expected = positions[b][(positions[b] >= 0) & (positions[b] <= offset + query)]
            assert sorted(seen) == sorted(expected)
    assert found.any(axis=-1).all()


@pytest.mark.parametrize("column", KINDS)
def test_sequences_of_one_length_need_no_mask(column):
    course = Course(column, batch=2, evict_every=1)

    def mask(length):  # of a copy, because a mask makes room for the tokens that it announces
        return copy.deepcopy(course.cache).make_mask(length)

    course.prompts([20, 20])
    assert mask(1) is None
    assert mask(4) == "causal"
    course.tokens(3)
    assert mask(1) is None
    shorter = course.new(1, seed=5)
    shorter.prompts([4])
    course.extend(shorter)
    assert np.array(mask(1)).shape[0] == 3
    course.tokens(10)
    assert mask(1) is None  # all are at the budget


@pytest.mark.parametrize("column", COLUMNS)
def test_bytes_of_a_full_batch_are_those_of_its_sequences(column):
    course = Course(column, batch=2)
    assert (course.cache.empty(), course.cache.nbytes, course.cache.size()) == (True, 0, 0)
    course.prompts([40, 30], step=40)
    course.flush()
    assert course.cache.size() == 14
    alone = [course.extract(place).cache for place in range(2)]
    stored = [sum(array.nbytes for array in arrays_of(cache.state)) for cache in alone]
    assert course.cache.nbytes == sum(stored)
    assert type(alone[0]) is type(new_cache(course.config))


@pytest.mark.parametrize("column", KINDS)
def test_unused_slots_hold_nothing(column):
    course = Course(column, batch=2)
    course.prompts([10, 4])
    positions, scores = np.array(course.cache.positions), np.array(course.cache.scores)
    assert positions.shape == scores.shape
    assert (positions >= 0).sum(axis=2).tolist() == [[10] * HEADS, [4] * HEADS]
    assert np.isnan(scores[positions < 0]).all()
    if not course.column.mixed:  # which has some in each segment
        assert (positions[1, :, 4:] == -1).all()


def test_many_tokens_of_unlike_sequences_lie_where_they_came():
    course = Course("dense", batch=2, max_kv_size=99)
    course.prompts([3, 9])
    course.tokens(70)


@pytest.mark.parametrize("column", KINDS)
def test_merging_leaves_the_caches_as_they_were(column):
    course = Course(column)
    course.chunk(20)
    course.flush()
    before = rows_by_position(course.cache)
    batch = H2OKVCache.merge([course.cache, new_cache(course.config)])
    rows = [mx.ones((2, HEADS, 1, SIZE))] * 2
    for _ in range(6):
        batch.update_and_fetch(*rows)
        batch.update_scores(mx.ones((2, 4, 1, batch.positions.shape[2])))
    assert rows_by_position(course.cache) == before
    course.check()
    course.tokens(3)


def test_more_is_taken_back_than_one_sequence_has():
    course = Course(batch=2)
    course.prompts([8, 4])
    course.cache.trim(6)
    assert course.cache.offset.tolist() == [2, 0]


# What does not fit


@pytest.mark.parametrize("column", KINDS)
def test_batches_of_no_sequences(column):
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.merge\] found no caches"):
        BatchH2OKVCache.merge([])
    course = Course(column, batch=2)
    course.prompts([8, 4])
    batch = course.cache
    batch.filter([])
    assert (batch.offset.shape, batch.size(), batch.nbytes) == ((0,), 0, 0)
    with pytest.raises(ValueError, match=r"expected B = 0 sequences"):
        batch.update_and_fetch(*[mx.zeros((1, HEADS, 1, SIZE))] * 2)
    batch.extend(Course(column, batch=1).cache)
    assert batch.offset.tolist() == [0]


def test_caches_that_do_not_fit_each_other():
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.merge\] found a KVCache"):
        H2OKVCache.merge([H2OKVCache(), mlx_lm_cache.KVCache()])
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.merge\] found the settings .*Window"):
        H2OKVCache.merge([small("h2o-ema"), small("window")])
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.merge\] found"):
        H2OKVCache.merge([H2OKVCache(), QuantizedH2OKVCache()])
    two = small("window")
    two.update_and_fetch(*[mx.zeros((2, HEADS, 1, SIZE))] * 2)
    with pytest.raises(ValueError, match="found a cache of 2 sequences, expected one"):
        H2OKVCache.merge([two])
    batch = H2OKVCache.merge([small()])
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.extend\] found a H2OKVCache"):
        batch.extend(small())
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.extend\] found the settings"):
        batch.extend(H2OKVCache.merge([small("window")]))


def test_numbers_that_do_not_fit_the_batch():
    course = Course(batch=2)
    batch = course.cache
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.prepare\] lengths is \[1\], expected"):
        batch.prepare(lengths=[1], right_padding=[0])
    with pytest.raises(ValueError, match="right_padding is given without lengths"):
        batch.prepare(right_padding=[1, 0])
    course.prompts([8, 4])
    with pytest.raises(ValueError, match="left_padding is given, expected it before the first"):
        batch.prepare(left_padding=[1, 0])
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.extract\] found the indices \[2\]"):
        batch.extract(2)
    for wrong in ([0, 2.5], "01", [False, True], [0, None], np.array([0, 0.7]), 1):
        with pytest.raises(ValueError, match=r"^\[BatchH2OKVCache.filter\] found the indices "):
            batch.filter(wrong)
        with pytest.raises(ValueError, match=r"^\[BatchH2OKVCache.prepare\] lengths is "):
            batch.prepare(lengths=wrong)
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.filter\] found the indices \[0, 2\]"):
        batch.filter([0, 2])
    assert batch.extract(np.int64(1)).offset == batch.extract(mx.array(1)).offset == 4
    with pytest.raises(ValueError, match="expected B = 2 sequences|expected .* B = 2"):
        batch.update_and_fetch(*[mx.zeros((3, HEADS, 1, SIZE))] * 2)
    with pytest.raises(ValueError, match=r"make_mask\] window_size is 5"):
        batch.make_mask(1, window_size=5)
