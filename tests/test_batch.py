"""BatchH2OKVCache: every sequence keeps what it keeps alone, whatever its neighbours do."""

from __future__ import annotations

import copy

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_checks import HEADS, SIZE, Lone, chunk, decode, rows_of
from cache_checks import small
from mlx_h2o import BatchH2OKVCache, H2OConfig, H2OKVCache, QuantizedH2OKVCache, policies

POLICIES = policies.names()


def config(policy="h2o", **given) -> H2OConfig:
    chosen = {"max_kv_size": 12, "sink_size": 2, "recent_size": 4, "policy": policy} | given
    return H2OConfig(**chosen)


def pair(chosen, seeds):
    """A batch, and the same sequences alone."""
    alone = [Lone(chosen, seed) for seed in seeds]
    return H2OKVCache.merge([H2OKVCache(chosen) for _ in seeds]), alone


def check(batch, alone) -> None:
    """Positions, scores and rows of every sequence."""
    assert batch.offset.tolist() == [one.cache.offset for one in alone]
    for place, one in enumerate(alone):
        found, expected = rows_of(batch.extract(place)), rows_of(one.cache)
        assert found.keys() == expected.keys()
        for head, rows in expected.items():
            for position, (score, key, value) in rows.items():
                assert position in found[head], f"sequence {place}, head {head}: {position}"
                other = found[head][position]
                if batch.policy.needs_scores:  # else it may hold ranks that came by the way
                    np.testing.assert_allclose(other[0], score, rtol=1e-4, atol=1e-5)
                np.testing.assert_array_equal(other[1], key)
                np.testing.assert_array_equal(other[2], value)
            assert len(rows) == len(found[head])
        assert batch.extract(place).evicted == one.cache.evicted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("evict_every", [1, 3])
def test_each_sequence_keeps_what_it_keeps_alone(policy, evict_every):
    batch, alone = pair(config(policy, evict_every=evict_every), [1, 2, 3])
    for lengths in ([5, 17, 9], [3, 3, 3], [1, 30, 2]):
        chunk(batch, alone, lengths, step=8)
        check(batch, alone)
        decode(batch, alone, 9)
        check(batch, alone)


@pytest.mark.parametrize("policy", ["h2o", "h2o-sum", "snapkv"])
def test_long_chunks_score_each_sequence_by_its_own_last_queries(policy):
    batch, alone = pair(config(policy), [1, 2])
    chunk(batch, alone, [150, 20], step=200)
    check(batch, alone)


@pytest.mark.parametrize("policy", POLICIES)
def test_shared_heads(policy):
    batch, alone = pair(config(policy, shared_heads=True), [1, 2])
    chunk(batch, alone, [15, 4], step=8)
    decode(batch, alone, 20)
    check(batch, alone)


@settings(max_examples=15, deadline=None)
@given(
    data=st.data(),
    policy=st.sampled_from(["h2o", "window", "keydiff"]),
    evict_every=st.sampled_from([1, 1, 2, 4]),
    max_kv_size=st.integers(3, 9),
)
def test_any_course_of_a_batch(data, policy, evict_every, max_kv_size):
    """Chunks, tokens, sequences that leave and that join."""
    sink_size = data.draw(st.integers(0, 2), "sink_size")
    chosen = H2OConfig(
        max_kv_size=max_kv_size, sink_size=sink_size, policy=policy, evict_every=evict_every
    )
    batch, alone = pair(chosen, [0, 1])
    for seed in range(2, 6):
        what = data.draw(st.sampled_from(["chunk", "decode", "filter", "extend"]), "what")
        if what == "chunk":
            lengths = [data.draw(st.integers(0, 12), "length") for _ in alone]
            chunk(batch, alone, lengths, step=data.draw(st.integers(1, 6), "step"))
        elif what == "decode":
            decode(batch, alone, data.draw(st.integers(1, 12), "tokens"))
        elif what == "filter":
            order = data.draw(st.permutations(range(len(alone))), "order")
            keep = order[: max(1, len(order) - 1)]
            batch.filter(keep)
            alone = [alone[index] for index in keep]
        else:
            other, others = pair(chosen, [10 * seed])
            chunk(other, others, [data.draw(st.integers(0, 12), "length")], step=4)
            batch.extend(other)
            alone += others
        check(batch, alone)


@pytest.mark.parametrize("given", [{"kv_bits": 8}, {"kv_bits": 8, "v_bits": 4}, {"kv_bits": 4}])
@pytest.mark.parametrize("policy", ["h2o", "window", "keydiff"])
def test_quantised_rows(policy, given):
    """The same packed rows as alone: joining and cutting quantises nothing."""
    chosen = config(policy, kv_group_size=32, **given)
    quantised = [QuantizedH2OKVCache(chosen) for _ in range(3)]
    batch, alone = H2OKVCache.merge(quantised), [Lone(chosen, seed) for seed in (1, 2, 3)]
    for one, cache in zip(alone, quantised, strict=True):
        one.cache = cache
    for lengths in ([5, 17, 9], [3, 1, 30]):
        chunk(batch, alone, lengths, step=12)
        check(batch, alone)
        decode(batch, alone, 9)
        check(batch, alone)
    assert type(batch.extract(0)) is QuantizedH2OKVCache
    found, expected = batch.extract(1), alone[1].cache
    for one, other in zip(_packed(found), _packed(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def _packed(cache) -> list[np.ndarray]:
    """Every packed array, rows in the order of positions."""
    cache.size()
    order = mx.argsort(cache.positions, axis=2)[..., None]
    parts = (*cache.keys, *cache.values)
    return [
        np.array(mx.take_along_axis(part, mx.broadcast_to(order, part.shape), axis=2))
        for part in parts
    ]


def test_steps_of_one_token_within_a_padded_prompt():
    batch, alone = pair(config(max_kv_size=3, sink_size=0, recent_size=1), [1, 2])
    chunk(batch, alone, [4, 5], step=1)
    check(batch, alone)


def test_sequences_of_one_length_know_the_next_row_to_go():
    """Attention names it, as alone; another length, and each sequence is searched."""
    batch, alone = pair(config(), [1, 2])
    chunk(batch, alone, [12, 12], step=16)
    decode(batch, alone, 6)
    check(batch, alone)
    other, others = pair(config(), [3])
    chunk(other, others, [20], step=16)
    batch.extend(other)
    decode(batch, [*alone, *others], 6)
    check(batch, [*alone, *others])


def test_left_padding_is_no_part_of_the_sequence():
    batch, alone = pair(config(), [1, 2])
    batch.prepare(left_padding=[5, 0])
    assert batch.offset.tolist() == [-5, 0]
    chunk(batch, alone, [3, 8], step=4, left=True)
    check(batch, alone)
    decode(batch, alone, 12)
    check(batch, alone)


def test_a_full_batch_writes_in_place_and_its_mask_goes():
    batch, alone = pair(config(), [1, 2])
    chunk(batch, alone, [10, 4], step=16)
    padding = []
    for _ in range(10):
        mask = batch.make_mask(1)
        padding.append(0 if mask is None else int((~mask[1]).sum()))
        decode(batch, alone, 1)
    assert padding == [6, 6, 5, 4, 3, 2, 1, 0, 0, 0]
    assert (batch.size(), batch.make_mask(1), batch.make_mask(4)) == (12, None, "causal")


def test_the_mask_of_a_chunk():
    batch, alone = pair(config(), [1, 2])
    chunk(batch, alone, [3, 1], step=16)
    batch.prepare(lengths=[1, 2], right_padding=[1, 0])
    mask = np.array(batch.make_mask(2))[:, 0].astype(int).tolist()
    assert mask == [
        [[1, 1, 1, 1, 0], [0, 0, 0, 0, 1]],  # the second is padding: it sees itself only
        [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]],  # two slots of padding on the left
    ]


def test_nothing_is_lost_on_the_way_through_a_state():
    batch, alone = pair(config(), [1, 2])
    chunk(batch, alone, [10, 4], step=16)
    decode(batch, alone, 5)
    others = [
        (copied, copy.deepcopy(alone))
        for copied in (BatchH2OKVCache.from_state(batch.state), copy.deepcopy(batch))
    ]
    decode(batch, alone, 5)
    for other, its in others:
        assert (other.offset.tolist(), other.evicted) == ([15, 9], 3)
        decode(other, its, 5)
        for one, two in zip(other.state[:4], batch.state[:4], strict=True):
            np.testing.assert_array_equal(np.array(one), np.array(two))


def test_a_batch_below_its_budget_may_be_trimmed():
    batch, alone = pair(config(), [1, 2])
    chunk(batch, alone, [8, 4], step=16)
    assert batch.is_trimmable()
    assert batch.trim(2) == 2
    assert batch.offset.tolist() == [6, 2]
    for one in alone:
        one.cache.trim(2)
    assert [rows_of(batch.extract(i))[0, 0].keys() for i in (0, 1)] == [
        rows_of(one.cache)[0, 0].keys() for one in alone
    ]
    decode(batch, alone, 12)
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.trim\] this cache has evicted rows"):
        batch.trim(1)


@pytest.mark.parametrize("policy", ["h2o", "window"])
def test_the_graph_of_a_step_does_not_grow(policy, tmp_path):
    """Whoever evaluates the output evaluates positions and scores, of unequal sequences too."""
    batch, alone = pair(config(policy), [1, 2])
    chunk(batch, alone, [10, 4], step=16)
    sizes = []
    for step in range(60):
        decode(batch, alone, 1)
        if step in (20, 55):
            file = tmp_path / "graph.dot"
            mx.export_to_dot(str(file), batch.positions, batch.scores, *batch._store.arrays())
            sizes.append(file.read_text().count("->"))
    assert sizes[0] == sizes[1] < 40


def test_a_sink_that_came_over_padding_stays_where_it_is():
    chosen = config(max_kv_size=3, sink_size=1, recent_size=1)
    batch, alone = pair(chosen, [0, 1])
    other, others = pair(chosen, [2])
    chunk(other, others, [3], step=4)
    batch.extend(other)
    alone += others
    decode(batch, alone, 8)
    check(batch, alone)


def test_bytes_and_size():
    batch, alone = pair(config(), [1, 2])
    assert (batch.empty(), batch.nbytes, batch.size()) == (True, 0, 0)
    chunk(batch, alone, [40, 30], step=40)
    assert not batch.empty()
    assert (batch.size(), batch.nbytes) == (12, sum(one.cache.nbytes for one in alone))


def test_merging_leaves_the_caches_as_they_were():
    one = Lone(config(), 3)
    chunk(H2OKVCache.merge([H2OKVCache(one.cache.config)]), [one], [20], step=20)
    before, twin = rows_of(one.cache), copy.deepcopy(one)
    batch = H2OKVCache.merge([one.cache, H2OKVCache(one.cache.config)])
    decode(batch, [twin, Lone(config(), 4)], 6)
    after = rows_of(one.cache)
    assert {head: list(rows) for head, rows in before.items()} == {
        head: list(rows) for head, rows in after.items()
    }


# What does not fit


def test_batches_of_length_0():
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.merge\] found no caches"):
        BatchH2OKVCache.merge([])
    batch, alone = pair(config(), [1, 2])
    chunk(batch, alone, [8, 4], step=16)
    batch.filter([])
    assert (batch.offset.shape, batch.size(), batch.nbytes) == ((0,), 0, 0)
    with pytest.raises(ValueError, match=r"expected B = 0 sequences"):
        batch.update_and_fetch(*[mx.zeros((1, HEADS, 1, SIZE))] * 2)
    batch.extend(pair(config(), [5])[0])
    assert batch.offset.tolist() == [0]


def test_caches_that_do_not_fit_each_other():
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.merge\] found a KVCache"):
        H2OKVCache.merge([H2OKVCache(), mlx_lm_cache.KVCache()])
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.merge\] found the settings .*window"):
        H2OKVCache.merge([small("h2o"), small("window")])
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
    batch, alone = pair(config(), [1, 2])
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.prepare\] lengths is \[1\], expected"):
        batch.prepare(lengths=[1], right_padding=[0])
    with pytest.raises(ValueError, match="right_padding is given without lengths"):
        batch.prepare(right_padding=[1, 0])
    chunk(batch, alone, [8, 4], step=16)
    with pytest.raises(ValueError, match="left_padding is given, expected it before the first"):
        batch.prepare(left_padding=[1, 0])
    with pytest.raises(
        ValueError, match=r"\[BatchH2OKVCache.extract\] index is 2, expected 0 to 1"
    ):
        batch.extract(2)
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.filter\] found the indices \[2\]"):
        batch.filter([0, 2])
    with pytest.raises(ValueError, match="expected B = 2 sequences|expected .* B = 2"):
        batch.update_and_fetch(*[mx.zeros((3, HEADS, 1, SIZE))] * 2)
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.make_mask\] window_size is 5"):
        batch.make_mask(1, window_size=5)
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.state\] found 1 parts, expected 8"):
        BatchH2OKVCache.from_state((1,))


def test_scores_that_do_not_come():
    batch, _ = pair(config(), [1, 2])
    rows = [mx.zeros((2, HEADS, 1, SIZE))] * 2
    batch.update_and_fetch(*rows)
    with pytest.raises(RuntimeError, match="got no scores for its last update"):
        batch.update_and_fetch(*rows)
