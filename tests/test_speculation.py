"""Speculation: what is rejected leaves no trace, before and after evictions."""

from __future__ import annotations

import copy
import json

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_checks import GROUP, HEADS, SIZE, attended
from mlx_h2o import H2OConfig, H2OKVCache, load_prompt_cache, policies, save_prompt_cache
from mlx_h2o.caches.speculative_cache import SpeculativeH2OKVCache, cache_of
from mlx_h2o.operations import native

POLICIES = policies.names()
BY_RANK = {"kv_bits": 8, "light_bits": 4, "dense_size": 2}
BY_PART = {"kv_bits": 8, "v_bits": 4, "dense_size": 1}


def config(policy="h2o", **given) -> H2OConfig:
    chosen = {"max_kv_size": 8, "sink_size": 1, "recent_size": 3, "policy": policy}
    return H2OConfig(**(chosen | {"speculative": 2, "kv_group_size": 32} | given))


class Tokens:
    """Accepted tokens by position, and drafts that are something else."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.accepted = self.random(400)

    def random(self, count: int):
        heads = (HEADS * GROUP, HEADS, HEADS)
        return [self.rng.standard_normal((1, h, count, SIZE)).astype(np.float32) for h in heads]

    def feed(self, cache, count: int, rejected: int = 0) -> np.ndarray:
        """The next tokens and then drafts that will not do; the output of the first ones."""
        start = cache.offset
        drafts = self.random(rejected)
        arrays = [
            np.concatenate([array[:, :, start : start + count], draft], axis=2)
            for array, draft in zip(self.accepted, drafts, strict=True)
        ]
        return np.array(attended(cache, *arrays))[:, :, :count]


def contents(cache) -> dict:
    """Everything that a later step could depend on, whatever the order of the slots."""
    positions, importance = np.array(cache.positions), np.array(cache.scores)
    keys, values = (np.array(array) for array in cache._store.dense())
    order = np.argsort(positions, axis=2)
    found = {
        "counts": (cache.offset, cache.evicted, cache._frontier, cache._committed(cache._store)),
        "positions": np.take_along_axis(positions, order, 2),
        "importance": np.take_along_axis(importance, order, 2),
        "keys": np.take_along_axis(keys, order[..., None], 2),
        "values": np.take_along_axis(values, order[..., None], 2),
        "spans": [(aside.start, aside.stop) for aside in cache._asides],
    }
    for index, aside in enumerate(cache._asides):
        seen = np.array(aside.visible(cache.positions < aside.stop))
        by_head = np.repeat(order, seen.shape[1] // HEADS, axis=1)[:, :, None]
        found[f"aside {index}"] = np.take_along_axis(
            seen, np.broadcast_to(by_head, seen.shape), axis=3
        )
    return found


def equal(one, other) -> None:
    a, b = contents(one), contents(other)
    assert a.keys() == b.keys()
    for name, found in a.items():
        if isinstance(found, np.ndarray):
            np.testing.assert_allclose(found, b[name], rtol=1e-4, atol=1e-5, err_msg=name)
        else:
            assert found == b[name], name


def check_course(chosen, data, rounds: int) -> None:
    """Rounds of speculation, as a target model and as a draft model see them.

    The cache that is given only what stays may gather where the other writes in place.
    """
    tokens = Tokens(data.draw(st.integers(0, 2**16), "seed"))
    prompt = data.draw(st.sampled_from([1, 2, 5, 12, 30]), "prompt")
    cache, other = cache_of(chosen), cache_of(chosen)
    for one in (cache, other):
        tokens.feed(one, prompt)
        mx.eval(one.state[:4])
    if other._store.by_slot:
        other._store.by_slot = not data.draw(st.booleans(), "gathers")
    for _ in range(rounds):
        drafted = data.draw(st.integers(0, chosen.speculative + 1), "drafted")
        accepted = data.draw(st.integers(0, drafted), "accepted")
        if data.draw(st.booleans(), "at once"):
            # The token before the drafts is accepted; together at most speculative + 1.
            rejected = min(drafted, chosen.speculative) - min(accepted, chosen.speculative)
            count = min(accepted, chosen.speculative) + 1
            out = tokens.feed(cache, count, rejected)
            assert cache.trim(rejected) == rejected
            expected = tokens.feed(other, count)
            np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-4)
        else:
            for _ in range(accepted):
                out = tokens.feed(cache, 1)
                np.testing.assert_allclose(out, tokens.feed(other, 1), rtol=1e-3, atol=1e-4)
            for _ in range(drafted - accepted):
                tokens.feed(cache, 0, 1)
            assert cache.trim(drafted - accepted) == drafted - accepted
        equal(cache, other)
        assert cache.size() <= chosen.max_kv_size + 2 * (chosen.speculative + 1)


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    policy=st.sampled_from(["h2o", "window", "keydiff", "h2o-sum", "tova"]),
    speculative=st.integers(1, 4),
    rows=st.sampled_from([{}, {}, {"kv_bits": 8}, BY_RANK, BY_PART]),
)
def test_a_rewound_cache_is_one_that_was_given_only_what_stays(data, policy, speculative, rows):
    check_course(config(policy, speculative=speculative, **rows), data, rounds=6)


@pytest.mark.parametrize("rows", [{}, BY_RANK, BY_PART])
@pytest.mark.parametrize("policy", POLICIES)
def test_long_courses(policy, rows):
    tokens, chosen = Tokens(1), config(policy, speculative=3, **rows)
    cache, other = cache_of(chosen), cache_of(chosen)
    for one in (cache, other):
        tokens.feed(one, 20)
    for turn in range(12):
        rejected = turn % 4
        tokens.feed(cache, 4 - rejected, rejected)
        cache.trim(rejected)
        tokens.feed(other, 4 - rejected)
        for _ in range(rejected):
            tokens.feed(cache, 0, 1)
        cache.trim(rejected)
        equal(cache, other)
    assert cache.evicted > 30


@pytest.mark.parametrize("policy", ["h2o", "window", "keydiff"])
def test_what_is_committed_is_what_a_cache_without_speculation_keeps(policy):
    """Token by token: the same steps, only later."""
    tokens, chosen = Tokens(2), config(policy, speculative=3)
    cache = cache_of(chosen)
    plain = H2OKVCache(config(policy, speculative=0))
    for step in range(40):
        tokens.feed(cache, 1)
        assert cache._frontier == max(0, step - 4)  # an update commits before it appends
        if cache._frontier > 0:
            tokens.feed(plain, 1)
            committed = cache._committed(cache._store)
            order = np.argsort(np.array(cache.positions), axis=2)[:, :, :committed]
            other = np.argsort(np.array(plain.positions), axis=2)
            for name in ("positions", "scores"):
                found = np.array(getattr(cache, name))
                np.testing.assert_allclose(
                    np.take_along_axis(found, order, 2),
                    np.take_along_axis(np.array(getattr(plain, name)), other, 2),
                    rtol=1e-5,
                )
    assert plain.evicted > 20


def test_rejected_queries_leave_no_score():
    tokens, chosen = Tokens(3), config()
    cache, other = cache_of(chosen), cache_of(chosen)
    for one in (cache, other):
        tokens.feed(one, 20)
        tokens.feed(one, 1)
    tokens.feed(cache, 0, 3)
    cache.trim(3)
    for _ in range(6):
        for one in (cache, other):
            tokens.feed(one, 1)
    equal(cache, other)


def test_the_last_tokens_are_never_evicted():
    tokens = Tokens(4)
    cache = cache_of(config("window", recent_size=0, max_kv_size=4, speculative=3))
    for _ in range(30):
        tokens.feed(cache, 1)
        newest = np.sort(np.array(cache.positions)[0, 0])[-4:].tolist()
        assert newest == list(range(max(0, cache.offset - 4), cache.offset))[-4:]
    assert cache.size() == 4 + 3 + 2


def test_trims_that_reach_too_far_are_refused():
    tokens, cache = Tokens(5), cache_of(config())
    tokens.feed(cache, 30)
    assert cache.is_trimmable()
    before = contents(cache_copy := copy.deepcopy(cache))
    with pytest.raises(
        ValueError, match=r"\[H2OKVCache.trim\] .* asked to take back 4 tokens, exp"
    ):
        cache.trim(4)
    assert contents(cache)["counts"] == before["counts"] == contents(cache_copy)["counts"]
    assert cache.trim(3) == 3
    below = cache_of(config())
    tokens.feed(below, 5)
    assert (below.trim(5), below.offset, below.size()) == (5, 0, 0)
    tokens.feed(below, 5)
    assert below.offset == 5


@pytest.mark.parametrize("rows", [{}, {"kv_bits": 8}, BY_RANK, BY_PART])
def test_copies_and_files_go_on_alike(rows, tmp_path):
    tokens, cache = Tokens(6), cache_of(config(**rows))
    tokens.feed(cache, 30)
    for count in (1, 3, 1):
        tokens.feed(cache, count)
    save_prompt_cache(tmp_path / "cache", [cache])
    twins = [copy.deepcopy(cache), *load_prompt_cache(tmp_path / "cache")]
    assert [type(twin) for twin in twins] == [type(cache)] * 2
    for count, rejected in ((1, 2), (2, 0), (1, 1)):
        for one in (cache, *twins):
            drafts = copy.deepcopy(tokens)
            drafts.feed(one, count, rejected)
            one.trim(rejected)
        for twin in twins:
            equal(cache, twin)


@pytest.mark.parametrize("rows", [{}, BY_RANK])
def test_the_graph_of_a_step_does_not_grow(rows, tmp_path):
    tokens, cache = Tokens(7), cache_of(config(**rows))
    sizes = []
    for turn in range(60):
        tokens.feed(cache, 1)  # evaluates the output only
        if turn in (20, 55):
            arrays = [cache.positions, cache.scores, *cache._store.arrays()]
            arrays += [aside.seen for aside in cache._asides]
            arrays += [array for entry in cache._log for array in entry.held]
            file = tmp_path / "graph.dot"
            mx.export_to_dot(str(file), *arrays)
            sizes.append(file.read_text().count("->"))
    assert sizes[0] == sizes[1] < 60


def coarseness(cache) -> dict:
    """By head and position: 0 for a row as it came, else 1 for a heavy tier, 2 for a light one."""
    store, found = cache._store, {}
    ends = np.cumsum([0, *(tier.length for tier in store.tiers)])
    for index in np.ndindex(*store.positions.shape):
        tier = int(np.searchsorted(ends, index[2], side="right"))
        found[(*index[:2], store.positions[index].item())] = tier % (len(store.tiers) + 1)
    return found


@pytest.mark.parametrize("rows", [BY_RANK, BY_PART])
@pytest.mark.parametrize("policy", ["h2o", "window", "keydiff"])
def test_provisional_rows_are_dense_and_packed_ones_gain_nothing(policy, rows):
    """Nor do they by a trim: what it brings back is what was there."""
    tokens, cache = Tokens(3), cache_of(config(policy, speculative=3, **rows))
    newest = rows["dense_size"] + 4
    tokens.feed(cache, 20)
    for turn in range(24):
        before = coarseness(cache)
        tokens.feed(cache, 1 + turn % 3, turn % 2)
        cache.trim(turn % 2)
        now = coarseness(cache)
        assert all(now[place] >= before[place] for place in now.keys() & before.keys())
        keys, values = (np.array(array) for array in cache._store.dense())
        for (b, h, position), tier in now.items():
            assert tier == 0 or position < cache.offset - newest
            slot = np.argmax(np.array(cache.positions)[b, h] == position)
            came = [array[b, h, position] for array in tokens.accepted[1:]]
            same = [np.array_equal(a[b, h, slot], c) for a, c in zip((keys, values), came)]  # noqa: B905
            assert all(same) == (tier == 0)
    assert max(now.values()) == len(cache._store.tiers)


@pytest.mark.parametrize("count", [1, 3])
def test_bytes_of_mixed_precision_count_every_array_once(count):
    tokens, cache = Tokens(8), cache_of(config(**BY_RANK))
    for _ in range(30):
        tokens.feed(cache, count)
    store, log = cache._store, cache._log
    arrays = [*store.arrays(), store.importance, store.positions]
    arrays += [aside.seen for aside in cache._asides]
    for entry in log:
        arrays += [*entry.whole.arrays(), entry.positions, entry.importance]
        arrays += [aside.seen for aside in entry.asides]
    held = {id(array): array.nbytes for array in arrays}
    assert cache.nbytes == sum(held.values())
    assert len(log) == (3 if count == 1 else 1)


def test_bytes_count_what_is_kept_to_go_back():
    tokens, cache = Tokens(8), cache_of(config())
    for _ in range(30):
        tokens.feed(cache, 1)
    store = cache._store.nbytes
    assert store < cache.nbytes < 3 * store


def test_settings_of_speculation():
    with pytest.raises(ValueError, match=r"\[H2OKVCache\] speculative is 2, expected 0, or a Spec"):
        H2OKVCache(config())
    with pytest.raises(ValueError, match=r"\[H2OConfig\] speculative is 2 and evict_every 3"):
        config(evict_every=3)
    with pytest.raises(ValueError, match=r"\[H2OConfig\] speculative is -1, expected an int"):
        config(speculative=-1)
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.merge\] speculative is 2, expected 0"):
        H2OKVCache.merge([cache_of(config())])
    with pytest.raises(ValueError, match=r"\[H2OKVCache.state\] found 3 parts, expected 12"):
        SpeculativeH2OKVCache.from_state((1, 2, 3))
    assert json.loads(cache_of(config()).state[8])["speculative"] == 2


@pytest.mark.skipif(bool(native.unavailable_reason()), reason="others copy where MLX does")
@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("policy", ["h2o", "window", "keydiff"])
def test_tokens_are_written_in_place(policy, kv_bits):
    """One by one, as a draft model proposes them, each over the row that goes."""
    tokens, cache = Tokens(9), cache_of(config(policy, max_kv_size=40, kv_bits=kv_bits))
    tokens.feed(cache, 60)

    def addresses() -> list[int]:
        arrays = cache._store.arrays()
        mx.eval(arrays)
        mx.synchronize()
        return [np.array(array, copy=False).ctypes.data for array in arrays]

    for _ in range(5):
        tokens.feed(cache, 1)
    before, evicted = addresses(), cache.evicted
    for _ in range(20):
        tokens.feed(cache, 1)
        assert addresses() == before
    assert cache.evicted == evicted + 20
