"""Caches in files: every kind continues as before, and files of earlier versions load."""

import json
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from cache_columns import COLUMNS, stored_rows
from cache_courses import Course
from cache_invariants import check_same, seen_from_outside
from mlx_h2o import H2OConfig, H2OKVCache, QuantizedH2OKVCache, load_prompt_cache, save_prompt_cache

EARLIER = Path(__file__).parent / "old_caches"
"""Files of version 0.1.0 with ``evict_every=1``, and in next.safetensors what that version made of
six more tokens: positions [6, B, H, N] after each, ascending, and its outputs [B, Hq, 6, D]."""


@pytest.mark.matrix(8)
@pytest.mark.parametrize("speculative", [0, 2])
@pytest.mark.parametrize("tokens", [0, 3, 10, 60])
@pytest.mark.parametrize(("policy", "column"), [*product(("h2o-ema", "h2o"), COLUMNS)])
def test_a_saved_cache_goes_on(policy, column, tokens, speculative, tmp_path):
    course = Course(column, policy, speculative=speculative, evict_every=4)
    course.tokens(tokens)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, [course.cache])
    (loaded,) = load_prompt_cache(file)
    assert type(loaded) is type(course.cache)
    course.flush()
    twin = course.copied()
    twin.cache = loaded
    twin.check()
    for one in (course, twin):
        for length in (1, 4, 12, 1, 1):
            one.chunk(length)
    check_same(seen_from_outside(course.cache), seen_from_outside(loaded))


def test_a_state_remembers_that_scores_are_due():
    course = Course()
    course.tokens(20)
    keys, values = (mx.array(part)[None] for part in course.sequences[0].next(1)[1:])
    course.cache.update_and_fetch(keys, values)
    again = H2OKVCache.from_state(course.cache.state)
    with pytest.raises(RuntimeError, match="got no scores"):
        again.update_and_fetch(keys, values)


def test_codes_come_back_in_the_dtype_of_their_rows():
    cache, rows = H2OKVCache(H2OConfig.of(kv_format="turbo3")), mx.ones((1, 2, 9, 32), mx.bfloat16)
    cache.update_and_fetch(rows, rows)
    keys, values = H2OKVCache.from_state(cache.state).update_and_fetch(rows, rows)
    assert keys.dtype == values.dtype == mx.bfloat16


@pytest.mark.parametrize("said", [{}, {"dense_size": None}, {"dense_size": 0}])
def test_all_rows_are_packed_where_earlier_versions_packed_them(said):
    few, rows = {"max_kv_size": None, "kv_bits": 4}, mx.ones((1, 2, 9, 64))
    cache = QuantizedH2OKVCache(H2OConfig.of(**few, dense_size=0))
    cache.update_and_fetch(rows, rows)
    settings = json.loads(cache.state[-1])
    assert settings.pop("dense_size") == 0
    again = QuantizedH2OKVCache.from_state((*cache.state[:-1], json.dumps(settings | said)))
    assert again.config == cache.config != H2OConfig.of(**few)
    assert json.loads(QuantizedH2OKVCache(H2OConfig.of(**few)).state[-1])["dense_size"] == 8


def test_states_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"\[H2OKVCache.state\] found 3 parts, expected 9"):
        H2OKVCache.from_state((None, None, 0))
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.state\] found 1 parts, expected"):
        type(Course(batch=1).cache).from_state((1,))


# Files of earlier versions


def earlier(name: str):
    """The cache of a file, and the file's own arrays by their place in the state."""
    file = EARLIER / f"{name}.safetensors"
    (cache,) = load_prompt_cache(file)
    return cache, mx.load(str(file))


def go_on(cache):
    """The outputs of six more tokens, and the positions after each."""
    tokens = mx.load(str(EARLIER / "next.safetensors"))
    outs, positions = [], []
    for index in range(6):
        queries, keys, values = (
            tokens[name][:, :, index : index + 1] for name in ("queries", "keys", "values")
        )
        k, v = cache.update_and_fetch(keys, values)
        latents = cache.config.kv_handed == "latents"
        outs.append(cache.attend(queries, k, k if latents else v, scale=0.2))
        positions.append(mx.sort(cache.positions, axis=2))
    return mx.concatenate(outs, axis=2), mx.stack(positions), tokens


@pytest.mark.parametrize("name", ["dense_h2o", "packed_keydiff", "latents_keydiff"])
def test_a_file_of_before_goes_on_as_it_did(name):
    cache, _ = earlier(name)
    assert (cache.offset, cache.evicted, cache.size()) == (39, 23, 16)
    assert (cache.name, cache.config.budget.evict_every) == ("qwen3 layer 0", 1)
    found, positions, expected = go_on(cache)
    np.testing.assert_array_equal(np.array(positions), np.array(expected[f"{name}.positions"]))
    if f"{name}.out" in expected:
        out = np.array(expected[f"{name}.out"])
        np.testing.assert_allclose(np.array(found), out, rtol=1e-4, atol=2e-5)
    assert cache.size() == 16


def test_a_file_of_mixed_precision_goes_on():
    """The same positions and rows; others are packed first now, so outputs differ slightly."""
    cache, _ = earlier("mixed_h2o")
    assert type(cache) is QuantizedH2OKVCache
    assert (cache.offset, cache.evicted, cache.size()) == (39, 23, 16)
    keys, values = stored_rows(cache)
    assert keys.shape == values.shape == (1, 2, 16, 32)
    found, positions, expected = go_on(cache)
    wanted = np.array(expected["mixed_h2o.out"])
    assert np.abs(np.array(found) - wanted).max() < 0.2 * np.abs(wanted).max()
    assert (np.array(positions)[-1][..., -6:] == np.arange(39, 45)).all()
    assert cache.size() == 16


def test_a_file_of_a_cache_under_drafts_loads():
    """Its rows beyond the budget are a surplus now, which goes at the first occasion."""
    cache, arrays = earlier("speculative_h2o")
    assert type(cache) is H2OKVCache
    assert (cache.offset, cache.config.speculative) == (39, 2)
    saved = np.array(arrays["0.3"])
    assert saved.shape[2] == 20
    cache.flush()
    kept = np.array(cache.positions)
    assert cache.size() == 16
    protected = {0, 1, *range(39 - 6, 39)}
    keys = np.array(cache.keys)
    for head in range(2):
        assert protected <= set(kept[0, head].tolist()) <= set(saved[0, head].tolist())
        for slot, position in enumerate(kept[0, head]):
            was = int(np.argmax(saved[0, head] == position))
            np.testing.assert_array_equal(
                keys[0, head, slot], np.array(arrays["0.0"])[0, head, was]
            )
    out, _, _ = go_on(cache)
    assert cache.trim(3) == 3
    assert np.isfinite(np.array(out)).all()
    assert (cache.offset, cache.size() <= 16) == (42, True)
