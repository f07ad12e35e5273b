"""Scores that a cache is given: what they decide, ties, chunks, and what happens without scores."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_checks import SCALE, filled, random_tokens, rows_by_position, small
from cache_courses import Course
from cache_invariants import check_same, seen_from_outside
from mlx_h2o import H2OConfig, H2OKVCache, policies
from reference_cache import ReferenceCache

EXACT = [name for name in policies.names() if not policies.known(name).needs_weights]
"""Policies whose ranks are exact for ``exact_trace``: no exponential, so ties are ties."""


def exact_trace(rng, lengths, *, heads: int = 2, group: int = 2, size: int = 4):
    """Scores [Hq, T, T] by position, and keys [H, T, D], for ``check_trace``; some are masked."""
    total = sum(lengths)
    # Even numbers in pairs of heads: the mean over a group of two is exact too.
    scores = rng.integers(-4, 5, (heads * group, total, total)).astype(np.float32)
    scores = np.where(rng.random(scores.shape) < 0.2, -np.inf, scores).astype(np.float32)
    later = np.arange(total)[None] > np.arange(total)[:, None]
    scores = np.where(later, np.float32(-np.inf), scores)
    axes = rng.integers(0, size, (heads, total))
    lengths_of_keys = rng.choice([-2.0, -1.0, 1.0, 2.0], axes.shape)[..., None]
    return scores, np.eye(size, dtype=np.float32)[axes] * lengths_of_keys.astype(np.float32)


def check_trace(config, lengths, scores, keys) -> None:
    """The same rows as the reference after each step, ties included.

    ``scores`` are whole numbers and the decay is 1/2, ``keys`` are along the axes: all arithmetic
    is exact, so every order of rows gives the same C and ranks.
    """
    cache, slow = H2OKVCache(config), ReferenceCache(config, len(keys))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        slow.update(keys[:, part], keys[:, part])
        slow.absorb(scores[:, part])
        new = mx.array(keys[None, :, part])
        cache.update_and_fetch(new, new)
        slots = mx.repeat(cache.positions, len(scores) // len(keys), axis=1)[:, :, None]
        by_position = mx.array(scores[None, :, part])
        slots = mx.broadcast_to(slots, (*by_position.shape[:3], slots.shape[3]))
        cache.update_scores(mx.take_along_axis(by_position, slots, axis=-1))
        positions, found = rows_by_position(cache)
        assert [positions[0, head] for head in range(len(keys))] == slow.positions()
        if config.policy.name == "h2o-ema":
            for head, expected in enumerate(slow.scores()):
                np.testing.assert_array_equal(found[0, head], expected)


@settings(max_examples=40, deadline=None)
@given(
    st.data(), st.sampled_from(EXACT), st.integers(1, 8), st.integers(3, 8), st.integers(0, 2**16)
)
def test_ties_and_masked_scores(data, policy, evict_every, max_kv_size, seed):
    sink_size = data.draw(st.integers(0, max_kv_size - 1), "sink_size")
    recent_size = data.draw(st.integers(0, max_kv_size - sink_size), "recent_size")
    lengths = data.draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, 3, 5]), min_size=1), "lengths")
    # At most 21 tokens: sums of halves stay exact in float32.
    while sum(lengths) > 21:
        lengths.pop()
    config = H2OConfig.of(
        max_kv_size=max_kv_size, sink_size=sink_size, recent_size=recent_size, policy=policy,
        heavy_size=max_kv_size - sink_size - recent_size, decay=0.5, evict_every=evict_every,
    )  # fmt: skip
    check_trace(config, lengths, *exact_trace(np.random.default_rng(seed), lengths))


def test_only_the_last_128_queries_of_a_chunk_count():
    cache = small(max_kv_size=200)
    keys = mx.zeros((1, 1, 150, 4))
    cache.update_and_fetch(keys, keys)
    scores = mx.ones((1, 1, 150, 150))
    scores[:, :, :22] = 1e9
    cache.update_scores(scores)
    assert mx.allclose(cache.scores, mx.ones((1, 1, 150))).item()


def test_a_layer_may_attend_twice_to_the_rows_of_an_update():
    """Models that share keys between layers do: the surplus is still there."""
    _, keys, values = random_tokens(np.random.default_rng(4), 30)
    cache = small()
    k, _ = cache.update_and_fetch(mx.array(keys), mx.array(values))
    cache.update_scores(mx.ones((2, 4, 30, 30)))
    again, _ = cache.keys_and_values()
    assert k.shape == again.shape
    cache.update_scores(mx.ones((2, 4, 30, 30)) * 3)
    cache.flush()
    assert cache.size() == 16


def test_a_draft_that_was_attended_to_twice_leaves_no_trace():
    found = []
    for rejected in (1.0, 7.0):
        cache, rng = filled(tokens=20, speculative=3)
        cache.update_and_fetch(*map(mx.array, random_tokens(rng, 4)[1:]))
        for scores in ([1.0, 2.0, 3.0, rejected], [4.0, 5.0, 6.0, rejected]):
            cache.update_scores(mx.zeros((2, 4, 4, cache.size())) + mx.array(scores)[:, None])
        cache.trim(1)
        found.append(cache)
    check_same(*map(seen_from_outside, found))


def test_under_a_mask_too_scores_are_taken_in_at_once(monkeypatch):
    cache, rng = filled()
    monkeypatch.setattr(H2OKVCache, "update_scores", pytest.fail)
    q, k, v = map(mx.array, random_tokens(rng, 1))
    cache.attend(q, *cache.update_and_fetch(k, v), scale=SCALE, mask=mx.ones((1, 16)) > 0)


def test_sinks_take_their_share_of_the_weights():
    tokens = [mx.array(part) for part in random_tokens(np.random.default_rng(6), 4)]
    caches = [small("tova"), small("tova")]
    for cache, sinks in zip(caches, (None, mx.zeros(4)), strict=True):
        k, v = cache.update_and_fetch(*tokens[1:])
        cache.attend(tokens[0], k, v, scale=SCALE, mask="causal", sinks=sinks)
    without, with_sinks = (np.array(cache.scores).sum(axis=-1) for cache in caches)
    np.testing.assert_allclose(without, 1, rtol=1e-5)
    assert (with_sinks < 0.95).all()


# Scores that do not come, or do not fit


def test_an_update_without_scores_is_an_error_at_the_next():
    cache, rng = filled()
    keys = mx.array(random_tokens(rng, 1)[1])
    cache.update_and_fetch(keys, keys)
    with pytest.raises(RuntimeError, match=r"layer 0 got no scores.*'h2o-ema'.*routing.*interrupt"):
        cache.update_and_fetch(keys, keys)
    assert cache.offset == 41  # the second one did nothing


def test_nothing_goes_from_a_chunk_without_scores():
    cache = small()
    keys = mx.zeros((1, 1, 30, 4))
    cache.update_and_fetch(keys, keys)
    with pytest.raises(RuntimeError, match="got no scores"):
        cache.flush()
    assert (cache.evicted, cache.size()) == (0, 30)  # and looking is allowed


WRONG_SHAPES = [(2, 4, 1, 4), (2, 3, 1, 3), (1, 4, 1, 3), (2, 4, 3), (2, 4, 0, 3)]


@pytest.mark.parametrize(
    "scores", [*map(mx.zeros, WRONG_SHAPES), mx.zeros((2, 4, 1, 3), mx.float16)]
)
def test_scores_that_do_not_fit(scores):
    cache, _ = filled(tokens=3)
    with pytest.raises(ValueError, match=r"^\[H2OKVCache.update_scores\] scores are .*N = 3"):
        cache.update_scores(scores)
    with pytest.raises(ValueError, match="no rows to score"):
        H2OKVCache().update_scores(scores)


def test_another_policy_finds_no_scores_in_unused_slots():
    course = Course(policy="h2o-sum", batch=2)
    course.prompts([3, 5])
    course.under("snapkv").chunk(2)


def test_a_wrong_lse_is_refused():
    cache, _ = filled("tova")
    with pytest.raises(ValueError, match=r"^\[H2OKVCache.update_scores\] lse has shape \(2, 4\)"):
        cache.update_scores(mx.zeros((2, 4, 1, 16)), lse=mx.zeros((2, 4)))
