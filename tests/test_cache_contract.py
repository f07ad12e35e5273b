"""H2OKVCache: the members that mlx_lm asks of a cache, and errors."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest

from cache_checks import filled, random_tokens, small, step
from mlx_h2o import H2OKVCache, policies

POLICIES = policies.names()


def test_an_empty_cache():
    cache = H2OKVCache()
    assert cache.empty()
    assert (cache.size(), cache.nbytes, cache.offset) == (0, 0, 0)
    assert (cache.keys, cache.values, cache.scores, cache.positions) == (None,) * 4
    assert cache.is_trimmable()
    assert cache.trim(3) == 0
    assert cache.make_mask(3, return_array=True).tolist() == np.tri(3, dtype=bool).tolist()
    assert bool(cache)
    again = H2OKVCache.from_state(cache.state)
    assert again.empty()
    assert again.config == cache.config
    for name in ("bits", "group_size", "__len__"):
        assert not hasattr(cache, name)  # mlx_lm takes their presence for something else
    with pytest.raises(ValueError, match="no rows"):
        cache.keys_and_values()


def test_nbytes_counts_every_array():
    cache, _ = filled("h2o")
    per_row = 16 * 4 + 16 * 4 + 4 + 4  # key, value, score, position
    assert cache.nbytes == 2 * 2 * 16 * per_row


def test_room_grows_in_steps_up_to_the_budget():
    cache = small("window", max_kv_size=300)
    keys = mx.zeros((1, 1, 1, 4), mx.float16)
    rooms = set()
    for _ in range(320):
        cache.update_and_fetch(keys, keys)
        rooms.add(cache.nbytes - cache.size() * 8)
    assert rooms == {256 * 16, 300 * 16}


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


def test_trim_is_exact_before_the_first_eviction():
    rng = np.random.default_rng(6)
    tokens = [random_tokens(rng, 1) for _ in range(12)]
    cache, shorter = small("keydiff"), small("keydiff")
    for token in tokens[:12]:
        step(cache, *token)
    for token in tokens[:7]:
        step(shorter, *token)
    assert cache.is_trimmable()
    assert cache.trim(5) == 5
    assert (cache.offset, cache.size()) == (7, 7)
    for one, other in zip(cache.state[:4], shorter.state[:4], strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))
    more = [random_tokens(rng, length) for length in (3, 1, 9, 1, 1)]
    for token in more:
        np.testing.assert_array_equal(step(cache, *token), step(shorter, *token))
    assert cache.evicted == shorter.evicted == 6


def test_trim_takes_at_most_all():
    cache, _ = filled(tokens=5)
    assert cache.trim(9) == 5
    assert (cache.size(), cache.offset) == (0, 0)


def test_trim_after_an_eviction_is_an_error():
    cache, _ = filled(tokens=17)
    assert not cache.is_trimmable()
    with pytest.raises(ValueError, match=r"\[H2OKVCache.trim\].*tiny layer 0 has evicted rows"):
        cache.trim(1)


@pytest.mark.parametrize("policy", POLICIES)
def test_state_restores_everything(policy):
    cache, rng = filled(policy, decay=0.9)
    again = H2OKVCache.from_state(cache.state)
    assert (again.config, again.name) == (cache.config, cache.name)
    assert (again.offset, again.evicted, again.nbytes) == (40, 24, cache.nbytes)
    for length in (1, 4, 1, 1):
        token = random_tokens(rng, length)
        np.testing.assert_array_equal(step(cache, *token), step(again, *token))
    for one, other in zip(cache.state[:4], again.state[:4], strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))


def test_state_remembers_that_scores_are_due():
    cache, rng = filled()
    keys = mx.array(random_tokens(rng, 1)[1])
    cache.update_and_fetch(keys, keys)
    again = H2OKVCache.from_state(cache.state)
    with pytest.raises(RuntimeError, match="got no scores"):
        again.update_and_fetch(keys, keys)


def test_states_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"\[H2OKVCache.state\] found 3 parts, expected 9"):
        H2OKVCache.from_state((None, None, 0))


def test_mlx_lm_saves_the_state(tmp_path, monkeypatch):
    from mlx_lm.models import cache as mlx_lm_cache

    cache, _ = filled(decay=0.9)
    empty = H2OKVCache()
    file = str(tmp_path / "cache.safetensors")
    mlx_lm_cache.save_prompt_cache(file, [cache, empty], {"model": "tiny"})
    # mlx_lm looks classes up in its own module.
    monkeypatch.setattr(mlx_lm_cache, "H2OKVCache", H2OKVCache, raising=False)
    (loaded, loaded_empty), metadata = mlx_lm_cache.load_prompt_cache(file, return_metadata=True)
    assert metadata == {"model": "tiny"}
    assert loaded.config == cache.config
    assert loaded_empty.empty()
    for one, other in zip(cache.state[:4], loaded.state[:4], strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))
    assert loaded.state[4:] == cache.state[4:]


@pytest.mark.parametrize("tokens", [10, 40])
def test_copies_are_independent(tokens):
    cache, _ = filled(tokens=tokens)
    twin = copy.deepcopy(cache)
    before = [np.array(part) for part in twin.state[:4]]
    outputs = [step(cache, *token) for token in _tokens(5)]
    for one, other in zip(twin.state[:4], before, strict=True):
        np.testing.assert_array_equal(np.array(one), other)
    assert (twin.offset, cache.offset) == (tokens, tokens + 9)
    again = [step(twin, *token) for token in _tokens(5)]
    for one, other in zip(outputs, again, strict=True):
        np.testing.assert_array_equal(one, other)


def _tokens(seed):
    rng = np.random.default_rng(seed)
    return [random_tokens(rng, length) for length in (1, 1, 3, 1, 1, 1, 1)]


def test_what_was_handed_out_does_not_change():
    cache, rng = filled()
    held = [cache.keys, cache.values, cache.scores, cache.positions, *cache.state[:4]]
    before = [np.array(array) for array in held]
    for length in (1, 1, 5, 1, 1):
        step(cache, *random_tokens(rng, length))
    for one, other in zip(held, before, strict=True):
        np.testing.assert_array_equal(np.array(one), other)


def test_keys_and_values_may_be_set():
    cache, rng = filled("window", tokens=10)
    cache.keys = mx.depends(cache.keys, mx.zeros((1,)))
    cache.values = cache.values * 2
    expected = np.array(cache.values)
    _, keys, values = random_tokens(rng, 1)
    _, stored = cache.update_and_fetch(mx.array(keys), mx.array(values))
    np.testing.assert_array_equal(np.array(stored)[:, :, :-1], expected)
    with pytest.raises(ValueError, match=r"\[H2OKVCache.keys\] found .*expected 11 rows"):
        cache.keys = cache.keys[:, :, :5]
    with pytest.raises(ValueError, match=r"\[H2OKVCache.values\].*no rows are stored"):
        H2OKVCache().values = mx.zeros((1, 1, 1, 4))


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


@pytest.mark.parametrize(
    "scores",
    [
        mx.zeros((2, 4, 1, 4)),
        mx.zeros((2, 3, 1, 3)),
        mx.zeros((1, 4, 1, 3)),
        mx.zeros((2, 4, 3)),
        mx.zeros((2, 4, 1, 3), mx.float16),
        mx.zeros((2, 4, 0, 3)),
    ],
)
def test_scores_that_do_not_fit(scores):
    cache, _ = filled(tokens=3)
    with pytest.raises(ValueError, match=r"^\[H2OKVCache.update_scores\] scores are .*N = 3"):
        cache.update_scores(scores)
    with pytest.raises(ValueError, match="no rows to score"):
        H2OKVCache().update_scores(scores)
