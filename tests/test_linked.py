"""Linked caches in batches and under drafts: the indexer's rows go wherever the latents go."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_h2o
from mlx_h2o import BatchLinkedH2OCache, H2OConfig, H2OKVCache, LinkedH2OCache
from models import tiny

MODELS = ("deepseek_v32", "glm_moe_dsa")


def rows(positions, width: int, salt: float) -> mx.array:
    """[B, 1, L, width] of positions [B, L]; every row tells its position."""
    array = np.array(positions, np.float32)[:, None, :, None] + salt
    return mx.array(np.broadcast_to(array, (*array.shape[:3], width)))


def feed(cache, positions, random) -> None:
    """One forward of one layer, with scores of the leader where its policy wants them."""
    length = len(positions[0])
    mask = cache[0].make_mask(length, return_array=True)
    cache[0].update_and_fetch(rows(positions, 8, 0.25), rows(positions, 4, 0.5))
    cache[1].update_and_fetch(rows(positions, 16, 0.125), rows(positions, 2, 0.75))
    shape = (len(positions), 2, length, cache[0].positions.shape[2])
    scores = mx.array(random.standard_normal(shape).astype(np.float32))
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    cache[0].update_scores(scores)


def check_rows(cache) -> None:
    """Everything that is stored for a position came with it."""
    positions = np.array(cache[0].positions)
    for array, salt in (
        (cache[0].keys, 0.25),
        (cache[1].keys, 0.125),
        (cache[1].values, 0.75),
    ):
        found = np.array(array)[..., 0]
        np.testing.assert_array_equal(found[positions >= 0], positions[positions >= 0] + salt)


def spoken(cache, count: int) -> list[list[int]]:
    return [list(range(cache.offset, cache.offset + count))]


@settings(max_examples=30, deadline=None)
@given(
    rounds=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=14),
    prompt=st.sampled_from([1, 5, 20]),
    policy=st.sampled_from(["h2o", "window", "keydiff"]),
    data=st.data(),
)
def test_drafts_are_taken_back_with_their_companions(rounds, prompt, policy, data):
    random = np.random.default_rng(prompt)
    config = H2OConfig(max_kv_size=8, sink_size=1, recent_size=3, policy=policy, speculative=3)
    cache = LinkedH2OCache(config)
    feed(cache, spoken(cache, prompt), random)
    for drafted, at_once in rounds:
        parts = [drafted] if at_once else [1] * drafted
        for part in parts:
            feed(cache, spoken(cache, part), random)
        rejected = data.draw(st.integers(0, drafted), "rejected")
        assert cache.trim(rejected) == rejected
        check_rows(cache)
        assert cache[1].offset == cache[0].offset == cache.offset
        if data.draw(st.booleans(), "copied"):
            cache = copy.deepcopy(cache)
        elif data.draw(st.booleans(), "saved"):
            cache = LinkedH2OCache.from_state(cache.state)
        check_rows(cache)
    assert cache.size() <= 8 + 2 * 4


def linked_drafts() -> None:
    random = np.random.default_rng(4)
    cache = LinkedH2OCache(H2OConfig(max_kv_size=8, sink_size=1, policy="h2o", speculative=3))
    feed(cache, spoken(cache, 20), random)
    for drafted, rejected in ((4, 2), (1, 0), (3, 3), (4, 0), (2, 1), (4, 4), (1, 0)):
        feed(cache, spoken(cache, drafted), random)
        cache.trim(rejected)
        check_rows(cache)


def prompts_of(batch, lengths, random) -> None:
    """A prompt for each sequence, padded on the right."""
    seen, longest = batch.offset.tolist(), max(lengths)
    batch.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
    positions = [
        [start + place if place < length else -99 for place in range(longest)]
        for start, length in zip(seen, lengths, strict=True)
    ]
    feed(batch, positions, random)
    batch.size()
    batch.finalize()


def tokens_of(batch, count, random) -> None:
    for _ in range(count):
        feed(batch, [[start] for start in batch.offset.tolist()], random)


def sequences_that_come_and_go(policy="h2o", evict_every=1) -> None:
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
    feed(other, spoken(other, 12), random)
    batch.extend(LinkedH2OCache.merge([other]))
    assert batch.offset.tolist() == [21, 16, 12]
    tokens_of(batch, 7, random)
    check_rows(batch)
    twins = [copy.deepcopy(batch), BatchLinkedH2OCache.from_state(batch.state)]
    for twin in twins:
        tokens_of(twin, 3, np.random.default_rng(1))
        check_rows(twin)
    one = batch.extract(1)
    assert (type(one), one.offset, one[1].keys.shape[2]) == (LinkedH2OCache, 23, one.size())
    check_rows(one)
    feed(one, spoken(one, 1), random)
    check_rows(one)


@pytest.mark.parametrize("policy", ["h2o", "window", "keydiff"])
@pytest.mark.parametrize("evict_every", [1, 3])
def test_sequences_come_and_go_with_their_companions(policy, evict_every):
    sequences_that_come_and_go(policy, evict_every)


def close(found, expected) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("given", [{}, {"kv_bits": 8, "kv_group_size": 32}])
@pytest.mark.parametrize("policy", ["h2o", "keydiff"])
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_an_indexed_model_is_its_sequences(name, policy, given):
    model = tiny.build(name, index_topk=24)
    lengths = (30, 7, 18)
    alone = [mlx_h2o.make_prompt_cache(model, 16, policy=policy, **given) for _ in lengths]
    batch = [caches[0].merge(list(caches)) for caches in zip(*alone, strict=True)]
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 90, 80) for _ in lengths]

    def tokens(place: int, start: int, count: int) -> mx.array:
        return mx.array(texts[place][start : start + count])[None]

    with mlx_h2o.routing(model):
        longest = max(lengths)
        for cache in batch:
            cache.prepare(lengths=list(lengths), right_padding=[longest - n for n in lengths])
        padded = [
            np.pad(text[:n], (0, longest - n)) for text, n in zip(texts, lengths, strict=True)
        ]
        found = model(mx.array(np.stack(padded)), cache=batch)
        mx.eval([cache.state for cache in batch])
        for cache in batch:
            cache.finalize()
        for place, length in enumerate(lengths):
            close(found[place, :length], model(tokens(place, 0, length), cache=alone[place])[0])
        for step in range(20):
            now = [tokens(place, n + step, 1) for place, n in enumerate(lengths)]
            found = model(mx.concatenate(now), cache=batch)
            for place, token in enumerate(now):
                close(found[place], model(token, cache=alone[place])[0])
        for cache in batch:
            cache.filter([2, 0])
        found = model(mx.concatenate([tokens(2, 38, 1), tokens(0, 50, 1)]), cache=batch)
        close(found[1], model(tokens(0, 50, 1), cache=alone[0])[0])
    assert all(cache.size() == 16 for cache in batch)
    assert {type(cache) for cache in batch} == {BatchLinkedH2OCache}


@pytest.mark.parametrize("given", [{}, {"kv_bits": 8, "kv_group_size": 32}])
@pytest.mark.parametrize("policy", ["h2o", "keydiff"])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_of_an_indexed_model_leave_no_trace(name, policy, given):
    model = tiny.build(name, index_topk=24)
    settings = {"policy": policy, "speculative": 3, **given}
    one, other = (mlx_h2o.make_prompt_cache(model, 16, **settings) for _ in range(2))
    rng = np.random.default_rng(1)
    text, seen = rng.integers(1, 90, 200), 30
    with mlx_h2o.routing(model):
        for caches in (one, other):
            mx.eval(model(mx.array(text[:30])[None], cache=caches))
        for accepted in (4, 1, 2, 3, 1, 1, 4, 2):
            part, drafts = text[seen : seen + accepted], rng.integers(1, 90, 4 - accepted)
            found = model(mx.array(np.concatenate([part, drafts]))[None], cache=one)
            for cache in one:
                assert cache.trim(len(drafts)) == len(drafts)
            close(found[:, :accepted], model(mx.array(part)[None], cache=other))
            seen += accepted
    for cache, twin in zip(one, other, strict=True):
        assert cache.offset == twin.offset == seen
        found, expected = (np.sort(np.array(c[0].positions), axis=2) for c in (cache, twin))
        np.testing.assert_array_equal(found, expected)


def test_a_model_drafts_with_linked_caches_in_mlx_lms_own_loop():
    model = tiny.build("deepseek_v32", index_topk=24)
    caches = mlx_h2o.make_prompt_cache(model, 12, policy="h2o", speculative=3)
    caches += mlx_h2o.make_prompt_cache(model, 12, policy="h2o", speculative=3)
    from mlx_lm.generate import speculative_generate_step

    prompt = mx.array(np.random.default_rng(2).integers(1, 90, 20))
    with mlx_h2o.routing(model):
        found = speculative_generate_step(
            prompt, model, model, num_draft_tokens=3, max_tokens=30, prompt_cache=caches
        )
        tokens = [(int(token), drafted) for token, _, drafted in found]
    assert len(tokens) == 30
    assert any(drafted for _, drafted in tokens)
    assert all(cache[0].evicted > 0 for cache in caches)


def test_what_does_not_fit_is_refused():
    model = tiny.build("deepseek_v32", index_topk=24)
    with pytest.raises(ValueError, match=r"max_kv_size \+ 2 \* \(speculative \+ 1\) = 25"):
        mlx_h2o.make_prompt_cache(model, 17, speculative=3)
    with pytest.raises(ValueError, match=r"\[BatchLinkedH2OCache.merge\] found a H2OKVCache"):
        LinkedH2OCache.merge([H2OKVCache()])
    batch = LinkedH2OCache.merge([LinkedH2OCache()])
    with pytest.raises(ValueError, match=r"\[BatchLinkedH2OCache.extend\] found a LinkedH2OCache"):
        batch.extend(LinkedH2OCache())
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.merge\] speculative is 3, expected 0"):
        LinkedH2OCache.merge([LinkedH2OCache(H2OConfig(speculative=3))])
    with pytest.raises(
        RuntimeError, match=r"\[FollowingRows.update_and_fetch\].*follow the leader"
    ):
        batch[1].update_and_fetch(rows([[0]], 8, 0), rows([[0]], 8, 0))
    leader = LinkedH2OCache(H2OConfig(policy="window"))
    leader[0].update_and_fetch(rows([[0, 1]], 8, 0), rows([[0, 1]], 8, 0))
    with pytest.raises(RuntimeError, match="found 1 tokens after 0 updates"):
        leader[1].update_and_fetch(rows([[0]], 8, 0), rows([[0]], 8, 0))
