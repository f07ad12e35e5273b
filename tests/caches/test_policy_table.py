"""Every policy against the same rules: one table, one set of tests."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from cache_checks import filled, random_tokens, rows_by_position, small
from mlx_h2o import H2OConfig, H2OKVCache, policies, use_backend
from readings import prefill
from tiny_models import random_prompt, tiny_qwen3


@dataclass(frozen=True)
class Expected:
    """What the documentation says of a policy."""

    scores: bool = False
    weights: bool = False
    unscored_first: bool = False
    heads_differ: bool = True
    folds: bool = False


TABLE = {
    "h2o": Expected(scores=True, weights=True, unscored_first=True, folds=True),
    "h2o-ema": Expected(scores=True, unscored_first=True),
    "h2o-sum": Expected(scores=True, weights=True, unscored_first=True),
    "window": Expected(heads_differ=False),
    "random": Expected(),
    "keydiff": Expected(),
    "snapkv": Expected(scores=True, weights=True, unscored_first=True),
    "tova": Expected(scores=True, weights=True, unscored_first=True),
    "value-aware": Expected(scores=True, weights=True, unscored_first=True),
    "mix": Expected(scores=True, weights=True, unscored_first=True),
}

each = pytest.mark.parametrize("name", TABLE)


def test_the_table_has_every_policy():
    assert tuple(TABLE) == policies.names()


@each
def test_what_it_needs(name):
    policy = H2OConfig.of(policy=name).policy
    expected = TABLE[name]
    assert (policy.needs_scores, policy.needs_weights) == (expected.scores, expected.weights)
    assert (policy.name, policy.folds) == (name, expected.folds)
    # Scores, or the bias of folded rows: the others run in plain mlx_lm.
    assert policy.needs_attention == (expected.scores or expected.folds)
    cache = small(name)
    rng = np.random.default_rng(0)
    for _ in range(2):
        _, keys, values = random_tokens(rng, 3)
        if policy.needs_attention and cache.offset:
            with pytest.raises(RuntimeError, match=f"the policy '{name}' needs (them|it)"):
                cache.update_and_fetch(mx.array(keys), mx.array(values))
        else:
            cache.update_and_fetch(mx.array(keys), mx.array(values))


@each
def test_heads_choose_by_themselves(name):
    kept = rows_by_position(filled(name)[0])[0]
    found = {tuple(positions) for (sequence, _), positions in kept.items() if sequence == 0}
    assert len(found) == 1 + TABLE[name].heads_differ


@each
def test_a_row_without_a_score_goes_first(name):
    cache, rng = filled(name)
    protected = {0, 1, *range(40 + 1 - cache.config.recent_size, 41)}
    slots = np.array(cache.positions)
    victim = {
        head: next(i for i, p in enumerate(slots[head]) if p not in protected)
        for head in np.ndindex(*slots.shape[:2])
    }
    scores = np.array(cache.scores)
    for head, slot in victim.items():
        scores[head][slot] = np.nan
    state = cache.state
    cache = H2OKVCache.from_state((*state[:2], mx.array(scores), *state[3:]))
    before, _ = rows_by_position(cache)
    _, keys, values = random_tokens(rng, 1)
    cache.update_and_fetch(mx.array(keys), mx.array(values))
    after, _ = rows_by_position(cache)
    for head, slot in victim.items():
        gone = set(before[head]) - set(after[head])
        assert len(gone) == 1
        if TABLE[name].unscored_first:
            assert gone == {slots[head][slot]}
        else:
            assert np.isfinite(np.array(cache.policy.rank(_rows_of(cache)))).all()


def _rows_of(cache) -> policies.Rows:
    keys, values = cache.keys, cache.values
    return policies.Rows(keys, values, cache.scores, cache.positions, cache.offset)


@each
def test_slots_mean_nothing(name):
    """Ranks follow the rows, in whatever slots they are."""
    cache, rng = filled(name)
    rows = _rows_of(cache)
    order = rng.permutation(16)
    parts = rows.keys, rows.values, rows.importance, rows.positions
    shuffled = policies.Rows(*(part[:, :, mx.array(order)] for part in parts), rows.offset)
    ranks = np.array(cache.policy.rank(rows))
    np.testing.assert_allclose(
        np.array(cache.policy.rank(shuffled)), ranks[..., order], rtol=1e-5, atol=1e-6
    )
    weights = mx.softmax(mx.random.normal((2, 4, 40, 16), key=mx.random.key(0)), axis=-1)
    after = np.array(
        cache.policy.accumulate(rows.importance, weights, positions=rows.positions, masked=False)
    )
    found = cache.policy.accumulate(
        shuffled.importance,
        mx.take(weights, mx.array(order), axis=3),
        positions=shuffled.positions,
        masked=False,
    )
    np.testing.assert_allclose(np.array(found), after[..., order], rtol=1e-4)


@each
def test_a_fully_masked_query_says_nothing_that_is_not_a_number(name):
    cache, _ = filled(name)
    cache.update_scores(mx.full((2, 4, 1, 16), -mx.inf))
    cache.update_scores(mx.full((2, 4, 2, 16), -mx.inf), lse=mx.full((2, 4, 2), -mx.inf))
    if TABLE[name].weights:
        assert np.isfinite(np.array(cache.scores)).all()


@each
def test_in_a_model_one_chunk_or_two_see_the_same_weights(name):
    """Routed: what long chunks leave is what the slow reference of the same scores makes."""
    model = tiny_qwen3()
    rows = []
    for backend in (None, "composed"):
        with use_backend(backend):
            caches = mlx_h2o.make_prompt_cache(model, 48, policy=name, sink_size=1)
            prefill(model, caches, random_prompt(200), chunk=40)
            prefill(model, caches, random_prompt(20, seed=5), chunk=1)
            rows.append([rows_by_position(cache)[0] for cache in caches])
            assert all(cache.size() == 48 and cache.offset == 220 for cache in caches)
    assert rows[0] == rows[1]


def test_another_seed_is_another_sample():
    kept = [
        rows_by_position(filled("random", tokens=60, random_seed=seed)[0])[0] for seed in (0, 1, 0)
    ]
    assert kept[0] == kept[2]
    assert kept[0] != kept[1]


def test_random_is_uniform_over_all_rows_seen():
    """4,000 rows, half of them kept: of each eighth of the sequence about as many."""
    cache = small("random", max_kv_size=2000, sink_size=0, recent_size=0, heavy_size=2000)
    chunk = mx.zeros((1, 32, 1000, 1))
    for _ in range(4):
        cache.update_and_fetch(chunk, chunk)
    cache.flush()
    shares = np.histogram(np.array(cache.positions), bins=8, range=(0, 4000))[0] / 32 / 2000
    np.testing.assert_allclose(shares, 1 / 8, atol=0.01)
