"""Linked caches: the indexer's rows go wherever the latents go, in batches and under drafts too."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_h2o import BatchLinkedH2OCache, H2OConfig, H2OKVCache, LinkedH2OCache
from reference_cache import ReferenceCache


def rows(positions, width: int, salt: float) -> mx.array:
    """[B, 1, L, width] of positions [B, L]; every row tells its position."""
    array = np.array(positions, np.float32)[:, None, :, None] + salt
    return mx.array(np.broadcast_to(array, (*array.shape[:3], width)))


def feed(cache, positions, random) -> None:
    """One forward of one layer, with scores of the leader where its policy wants them."""
    length = len(positions[0])
    mask = cache[0].make_mask(length, return_array=True)
    cache[0].update_and_fetch(rows(positions, 8, 0.25), rows(positions, 4, 0.5))
    keys, values = cache[1].update_and_fetch(rows(positions, 16, 0.125), rows(positions, 2, 0.75))
    assert keys.shape[2] == values.shape[2] >= cache[0].positions.shape[2]  # padding is handed out
    scores = random.standard_normal((len(positions), 2, length, keys.shape[2]))
    given = mx.array(scores.astype(np.float32))
    cache[0].update_scores(given if mask is None else mx.where(mask, given, -mx.inf))


def check_rows(cache) -> None:
    """Everything that is stored for a position came with it."""
    positions = np.array(cache[0].positions)
    np.testing.assert_array_equal(np.array(cache[1].positions), positions)
    for array, salt in (
        (cache[0].keys, 0.25),
        (cache[0].values, 0.5),
        (cache[1].keys, 0.125),
        (cache[1].values, 0.75),
    ):
        found = np.array(array)[..., 0]
        np.testing.assert_array_equal(found[positions >= 0], positions[positions >= 0] + salt)


def next_of(cache, count: int) -> list[list[int]]:
    return [list(range(cache.offset, cache.offset + count))]


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.sampled_from([1, 1, 1, 2, 5, 9]), min_size=1, max_size=30),
    evict_every=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 2**16),
)
def test_every_row_lies_in_the_leaders_slot(steps, evict_every, seed):
    config = H2OConfig(
        max_kv_size=8, sink_size=1, recent_size=3, policy="window", evict_every=evict_every
    )
    cache, slow = LinkedH2OCache(config, name="test layer 0"), ReferenceCache(config, 1)
    random = np.random.default_rng(seed)
    for index, count in enumerate(steps):
        slow.update(np.zeros((1, count, 1)), np.zeros((1, count, 1)))
        feed(cache, next_of(cache, count), random)
        check_rows(cache)
        if index % 5 == 4:
            cache.flush()
            slow.flush()
            check_rows(cache)
        assert cache.size() == slow.size
        assert sorted(np.array(cache[0].positions)[0, 0].tolist()) == slow.positions()[0]


@settings(max_examples=20, deadline=None)
@given(
    rounds=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=10),
    prompt=st.sampled_from([1, 5, 20]),
    policy=st.sampled_from(["h2o-ema", "window", "keydiff"]),
    data=st.data(),
)
def test_drafts_are_taken_back_with_the_rows_that_follow(rounds, prompt, policy, data):
    random = np.random.default_rng(prompt)
    config = H2OConfig(max_kv_size=8, sink_size=1, recent_size=3, policy=policy, speculative=3)
    cache = LinkedH2OCache(config)
    feed(cache, next_of(cache, prompt), random)
    for drafted, at_once in rounds:
        for part in [drafted] if at_once else [1] * drafted:
            feed(cache, next_of(cache, part), random)
        rejected = data.draw(st.integers(0, drafted), "rejected")
        assert cache.trim(rejected) == rejected
        check_rows(cache)
        assert cache[1].offset == cache[0].offset == cache.offset
        if data.draw(st.booleans(), "copied"):
            cache = copy.deepcopy(cache)
        elif data.draw(st.booleans(), "saved"):
            cache = LinkedH2OCache.from_state(cache.state)
        check_rows(cache)
    cache.flush()
    assert cache.size() <= 8


def prompts_of(batch, lengths, random) -> None:
    """A prompt for each sequence, padded on the right."""
    seen, longest = batch.offset.tolist(), max(lengths)
    batch.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
    positions = [
        [start + place if place < length else -99 for place in range(longest)]
        for start, length in zip(seen, lengths, strict=True)
    ]
    feed(batch, positions, random)
    batch.finalize()


def tokens_of(batch, count, random) -> None:
    for _ in range(count):
        feed(batch, [[start] for start in batch.offset.tolist()], random)


@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff"])
@pytest.mark.parametrize("evict_every", [1, 3, 16])
def test_sequences_come_and_go_with_the_rows_that_follow(policy, evict_every):
    config = H2OConfig(
        max_kv_size=8, sink_size=1, recent_size=3, policy=policy, evict_every=evict_every
    )
    random = np.random.default_rng(3)
    batch = LinkedH2OCache.merge([LinkedH2OCache(config) for _ in range(3)])
    for lengths, count in (([3, 7, 1], 6), ([2, 1, 9], 5)):
        prompts_of(batch, lengths, random)
        check_rows(batch)
        tokens_of(batch, count, random)
        check_rows(batch)
        assert batch[1].offset.tolist() == batch[0].offset.tolist()
    batch.filter([2, 0])
    check_rows(batch)
    other = LinkedH2OCache(config)
    feed(other, next_of(other, 12), random)
    batch.extend(LinkedH2OCache.merge([other]))
    assert batch.offset.tolist() == [21, 16, 12]
    tokens_of(batch, 7, random)
    check_rows(batch)
    for twin in (copy.deepcopy(batch), BatchLinkedH2OCache.from_state(batch.state)):
        tokens_of(twin, 3, np.random.default_rng(1))
        check_rows(twin)
    one = batch.extract(1)
    assert (type(one), one.offset, one[1].keys.shape[2]) == (LinkedH2OCache, 23, one.size())
    check_rows(one)
    feed(one, next_of(one, 1), random)
    check_rows(one)


def test_states_and_copies_go_on_alike():
    random = np.random.default_rng(0)
    cache = LinkedH2OCache(H2OConfig(max_kv_size=6, sink_size=1))
    for count in (4, 3, 1, 1):
        feed(cache, next_of(cache, count), random)
    for other in (copy.deepcopy(cache), LinkedH2OCache.from_state(cache.state)):
        assert other.offset == cache.offset
        assert other.nbytes > 0
        for count in (1, 3):
            feed(other, next_of(other, count), np.random.default_rng(1))
            check_rows(other)


def test_trim_takes_back_the_rows_of_both():
    random = np.random.default_rng(0)
    cache = LinkedH2OCache(H2OConfig(max_kv_size=16))
    feed(cache, next_of(cache, 7), random)
    assert cache.is_trimmable()
    assert cache.trim(3) == 3
    assert cache[1].keys.shape[2] == cache.offset == 4
    feed(cache, next_of(cache, 2), random)
    check_rows(cache)


def test_what_does_not_follow_is_refused():
    cache = LinkedH2OCache(H2OConfig(max_kv_size=8, policy="window"))
    with pytest.raises(
        RuntimeError, match=r"\[FollowingRows.update_and_fetch\].*follow the leader"
    ):
        cache[1].update_and_fetch(rows([[0]], 8, 0), rows([[0]], 8, 0))
    with pytest.raises(ValueError, match=r"keys have shape \(\), .*expected \[B, H, L, D\]"):
        cache[1].update_and_fetch(mx.array(1.0), mx.array(1.0))
    for part in cache.caches:
        part.update_and_fetch(rows([[0]], 8, 0), rows([[0]], 8, 0))
    cache[0].update_and_fetch(rows([[1]], 8, 0), rows([[1]], 8, 0))
    with pytest.raises(ValueError, match=r"keys are .*size 9, expected .*size 8"):
        cache[1].update_and_fetch(rows([[1]], 9, 0), rows([[1]], 8, 0))
    with pytest.raises(ValueError, match="keys"):
        cache[1].keys = rows([[1, 2, 3]], 8, 0)
    cache[1].keys = cache[1].keys * 1  # as models do, to make others wait for something
    leader = LinkedH2OCache(H2OConfig(policy="window"))
    leader[0].update_and_fetch(rows([[0, 1]], 8, 0), rows([[0, 1]], 8, 0))
    with pytest.raises(RuntimeError, match="found 1 tokens after 0 updates"):
        leader[1].update_and_fetch(rows([[0]], 8, 0), rows([[0]], 8, 0))


def test_what_does_not_fit_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"\[BatchLinkedH2OCache.merge\] found a H2OKVCache"):
        LinkedH2OCache.merge([H2OKVCache()])
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.merge\] speculative is 3, expected 0"):
        LinkedH2OCache.merge([LinkedH2OCache(H2OConfig(speculative=3))])
    batch = LinkedH2OCache.merge([LinkedH2OCache()])
    with pytest.raises(ValueError, match=r"\[BatchLinkedH2OCache.extend\] found a LinkedH2OCache"):
        batch.extend(LinkedH2OCache())
    with pytest.raises(RuntimeError, match=r"\[FollowingRows.update_and_fetch\].*follow"):
        batch[1].update_and_fetch(rows([[0]], 8, 0), rows([[0]], 8, 0))
