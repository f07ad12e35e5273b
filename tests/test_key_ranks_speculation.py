"""keydiff in one read where the newest rows are provisional: the rows of a second read."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_h2o
from cache_checks import SCALE, exact_trace, rows_by_position
from key_reads import SecondReadError, forbid_second_reads
from mlx_h2o import H2OConfig, make_prompt_cache
from mlx_h2o.caches import key_ranks
from mlx_h2o.caches.provisional_ranks import ProvisionalRanks
from mlx_h2o.caches.speculative_cache import cache_of
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    for name in ("SECOND_READ_BYTES", "GROUP_READ_BYTES", "DRAFT_READ_BYTES"):
        monkeypatch.setattr(key_ranks, name, -1)


def keydiff(size: int, speculative: int, **given) -> H2OConfig:
    chosen = {"sink_size": 1, "recent_size": 1, "policy": "keydiff", "speculative": speculative}
    return H2OConfig(max_kv_size=size, **chosen | given)


def attend(cache, keys: np.ndarray, *, routed: bool = True) -> None:
    """An update and its attention, as routed; or attention that says nothing."""
    batch, heads, length, width = keys.shape
    rows = mx.array(keys)
    k, v = cache.update_and_fetch(rows, rows)
    queries = mx.ones((batch, 2 * heads, length, width), rows.dtype)
    if routed and length <= 8 and cache.ranks_keys(queries, k):
        mask = None if length == 1 else "causal"
        mx.eval(cache.attend(queries, k, v, scale=SCALE, mask=mask))
    else:
        mx.eval(k, v)


def kept(cache) -> dict:
    return rows_by_position(cache)[0]


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    size=st.integers(3, 8),
    speculative=st.integers(1, 4),
    shared_heads=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_rows_are_those_of_a_second_read(data, size, speculative, shared_heads, seed):
    """Rounds of drafts of which some are taken back, chunks, copies, steps without routing.

    Keys with many ties.
    """
    sinks = data.draw(st.integers(0, 2))
    config = keydiff(size, speculative, sink_size=sinks, shared_heads=shared_heads)
    rng = np.random.default_rng(seed)
    _, keys = exact_trace(rng, [1] * 400)
    if shared_heads:  # the mean over heads rounds, which would break ties
        keys = rng.standard_normal(keys.shape).astype(np.float32)
    ours, theirs = cache_of(config), cache_of(config)
    start, reach = 0, speculative + 1
    events = ["round"] * 6 + ["singles", "singles", "chunk", "copy"]
    for event in data.draw(st.lists(st.sampled_from(events), min_size=4, max_size=16)):
        if event == "copy":
            ours = copy.deepcopy(ours)
            continue
        routed = data.draw(st.sampled_from([True, True, True, False]))
        count = data.draw(st.integers(1, reach))
        groups = {"round": [count], "singles": [1] * count, "chunk": [reach + 3]}[event]
        for length in groups:
            part = keys[:, :, start : start + length]
            start += length
            attend(ours, part, routed=routed)
            attend(theirs, part, routed=False)
            assert kept(ours) == kept(theirs)
        back = data.draw(st.integers(0, count)) if event != "chunk" else 0
        ours.trim(back)
        theirs.trim(back)
        assert kept(ours) == kept(theirs)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_drafts_evict_without_a_second_read(monkeypatch, bits, dtype):
    """Target and draft models' patterns, rounds that keep all, some and none of their drafts."""
    rng = np.random.default_rng(1)
    config = keydiff(24, 3, kv_bits=bits, kv_group_size=32, sink_size=2, recent_size=4)
    cache = cache_of(config)

    def fed(length: int, *, routed: bool = True) -> None:
        keys = mx.array(rng.standard_normal((1, 2, length, 32))).astype(dtype)
        attend(cache, np.array(keys), routed=routed)

    for length in [20] + [1] * 12:
        fed(length)
    forbid_second_reads(monkeypatch, few=4)
    for back in (0, 3, 1, 2, 3, 0, 3, 3, 2, 0, 0):
        fed(4)
        cache.trim(back)
    for _ in range(4):
        for _ in range(3):
            fed(1)
        cache.trim(2)
    assert cache.evicted > 20
    with pytest.raises(SecondReadError):
        for _ in range(3):
            fed(4, routed=False)


def test_what_is_known_stays_exact_for_long(monkeypatch):
    fresh = []
    of = ProvisionalRanks.of
    monkeypatch.setattr(
        ProvisionalRanks, "of", classmethod(lambda cls, *a: fresh.append(1) or of(*a))
    )
    rng = np.random.default_rng(2)
    cache = cache_of(keydiff(24, 3))
    rounds = 0
    while cache.evicted < 1000:
        attend(cache, rng.standard_normal((1, 2, 4, 16)).astype(np.float32))
        cache.trim(rounds % 4)
        rounds += 1
    assert len(fresh) == 1
    store, known = cache._store, cache._next_ranks
    dense, positions = np.array(store.dense()[0]), np.array(store.positions)
    norms = np.linalg.norm(dense, axis=-1)
    np.testing.assert_allclose(np.array(known.inverse_norms), 1 / norms, rtol=1e-5)
    directions = dense / norms[..., None]
    committed = (positions < cache._frontier)[..., None]
    np.testing.assert_allclose(
        np.array(known.committed), (directions * committed).sum(2), atol=2e-5
    )
    held = [entry.ranks.nbytes for entry in cache._log if entry.ranks is not None]
    assert held and cache.nbytes >= store.nbytes + sum(held)  # what would undo updates


@pytest.mark.parametrize("layers", [1, 2])
def test_drafts_of_mlx_lm_keep_the_rows_of_a_second_read(monkeypatch, layers):
    """The whole loop, with a draft model that is mostly wrong and one that never is."""
    found = []
    for threshold in (-1, 1 << 60):
        monkeypatch.setattr(key_ranks, "DRAFT_READ_BYTES", threshold)
        model, draft = tiny_qwen3(), tiny_qwen3(layers=layers)
        given = {"sink_size": 2, "recent_size": 4, "policy": "keydiff", "speculative": 3}
        caches = make_prompt_cache(model, 16, **given) + make_prompt_cache(draft, 16, **given)
        responses = mlx_h2o.stream_generate(
            model, tiny_tokenizer(), random_prompt(20), max_tokens=60, draft_model=draft,
            num_draft_tokens=3, prompt_cache=caches,
        )  # fmt: skip
        tokens = [response.token for response in responses]
        assert (caches[0]._next_ranks is not None) == (threshold < 0)
        found.append((tokens, [kept(cache) for cache in caches]))
    assert found[0] == found[1]
