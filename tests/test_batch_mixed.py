"""Batches in mixed precision: every sequence is packed and evicted as it is alone."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from batch_checks import HEADS, SIZE, Lone, chunk, decode
from mlx_h2o import BatchH2OKVCache, H2OConfig, H2OKVCache, QuantizedH2OKVCache, policies
from test_batch import check

POLICIES = policies.names()
BY_RANK = {"kv_bits": 8, "light_bits": 4, "kv_group_size": 32, "dense_size": 3}
BY_PART = {"kv_bits": 8, "v_bits": 4, "kv_group_size": 32, "dense_size": 3}
KINDS = {"8 and 4 by rank": BY_RANK, "K8 V4": BY_PART}


def config(policy="h2o", kind="8 and 4 by rank", **given) -> H2OConfig:
    chosen = {"max_kv_size": 14, "sink_size": 2, "recent_size": 5, "policy": policy}
    return H2OConfig(**chosen | KINDS[kind] | given)


def pair(chosen, seeds):
    """A batch, and the same sequences alone."""
    alone = [Lone(chosen, seed) for seed in seeds]
    return H2OKVCache.merge([QuantizedH2OKVCache(chosen) for _ in seeds]), alone


def sizes(cache) -> list[int]:
    """Rows of each tier, and the newest."""
    return [*(tier.length for tier in cache._store.tiers), cache._store.keys.shape[2]]


def check_packed(batch, alone) -> None:
    """The same rows, packed alike: also the codes, by position."""
    check(batch, alone)
    for place, one in enumerate(alone):
        found = batch.extract(place)
        if found.empty():
            continue
        one.cache.size()
        assert sizes(found) == sizes(one.cache)
        assert _bytes(found) == _bytes(one.cache)
        for mine, other in zip(packed(found), packed(one.cache), strict=True):
            assert mine.keys() == other.keys()
            for place_of in mine:
                for a, b in zip(mine[place_of], other[place_of], strict=True):
                    np.testing.assert_array_equal(a, b)


def _bytes(cache) -> int:
    """Of the rows and what goes with each; sums that keydiff keeps or lacks aside."""
    return sum(array.nbytes for _, array in tree_flatten(cache.state[:4]))


def packed(cache) -> list[dict]:
    """Of each tier, by head and position: the codes, scales and biases of a row."""
    positions, start, found = np.array(cache.positions), 0, []
    for tier in cache._store.tiers:
        arrays = [np.array(part) for part in tier.arrays()]
        rows = {}
        for b, h, slot in np.ndindex(*arrays[0].shape[:3]):
            rows[b, h, int(positions[b, h, start + slot])] = [part[b, h, slot] for part in arrays]
        found.append(rows)
        start += tier.length
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("evict_every", [1, 3])
def test_each_sequence_keeps_what_it_keeps_alone(policy, kind, evict_every):
    batch, alone = pair(config(policy, kind, evict_every=evict_every), [1, 2, 3])
    for lengths in ([5, 17, 9], [3, 3, 3], [1, 30, 2]):
        chunk(batch, alone, lengths, step=8)
        check_packed(batch, alone)
        decode(batch, alone, 9)
        check_packed(batch, alone)


@pytest.mark.parametrize("policy", ["h2o", "h2o-sum", "snapkv"])
def test_long_chunks_score_each_sequence_by_its_own_last_queries(policy):
    batch, alone = pair(config(policy), [1, 2])
    chunk(batch, alone, [150, 20], step=200)
    check_packed(batch, alone)


@pytest.mark.parametrize("policy", POLICIES)
def test_shared_heads(policy):
    batch, alone = pair(config(policy, shared_heads=True), [1, 2])
    chunk(batch, alone, [15, 4], step=8)
    decode(batch, alone, 20)
    check_packed(batch, alone)


@settings(max_examples=15, deadline=None)
@given(
    data=st.data(),
    policy=st.sampled_from(["h2o", "window", "keydiff", "random"]),
    kind=st.sampled_from(sorted(KINDS)),
    evict_every=st.sampled_from([1, 1, 2, 4]),
    max_kv_size=st.integers(4, 9),
)
def test_any_course_of_a_batch(data, policy, kind, evict_every, max_kv_size):
    """Chunks, tokens, sequences that leave and that join."""
    sink_size = data.draw(st.integers(0, 1), "sink_size")
    dense_size = data.draw(st.integers(1, 2), "dense_size")
    chosen = config(
        policy, kind, max_kv_size=max_kv_size, sink_size=sink_size, recent_size=3,
        heavy_size=None, dense_size=dense_size, evict_every=evict_every,
    )  # fmt: skip
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
        check_packed(batch, alone)


@pytest.mark.parametrize("policy", POLICIES)
def test_sequences_at_the_budget_share_their_arrays(policy):
    """Of unequal length too, but where the policy draws lots by positions."""
    batch, alone = pair(config(policy), [1, 2, 3])
    chunk(batch, alone, [30, 21, 5], step=16)
    decode(batch, alone, 4)
    before = len(batch._groups)
    decode(batch, alone, 12)
    assert (before, len(batch._groups)) == ((3, 3) if policy == "random" else (2, 1))
    check_packed(batch, alone)
    positions = np.array(batch.positions)
    assert positions.max(axis=(1, 2)).tolist() == [line - 1 for line in batch.offset.tolist()]
    batch.filter([2, 0])
    alone = [alone[2], alone[0]]
    chunk(batch, alone, [3, 9], step=16)  # and apart again
    decode(batch, alone, 3)
    check_packed(batch, alone)


def test_steps_of_one_token_within_a_padded_prompt():
    batch, alone = pair(config(max_kv_size=5, sink_size=0, recent_size=3, dense_size=2), [1, 2])
    chunk(batch, alone, [4, 9], step=1)
    check_packed(batch, alone)


def test_left_padding_is_no_part_of_the_sequence():
    batch, alone = pair(config(), [1, 2])
    batch.prepare(left_padding=[5, 0])
    assert batch.offset.tolist() == [-5, 0]
    chunk(batch, alone, [3, 8], step=4, left=True)
    check_packed(batch, alone)
    decode(batch, alone, 12)
    check_packed(batch, alone)


def test_the_masks_are_those_of_other_batches():
    batch, alone = pair(config(), [1, 2])
    chunk(batch, alone, [3, 1], step=16)
    batch.prepare(lengths=[1, 2], right_padding=[1, 0])
    mask = np.array(batch.make_mask(2))[:, 0].astype(int).tolist()
    assert mask == [
        [[1, 1, 1, 1, 0], [0, 0, 0, 0, 1]],  # the second is padding: it sees itself only
        [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]],  # two slots of padding on the left
    ]
    batch.finalize()
    padding = []
    for _ in range(14):
        mask = batch.make_mask(1)
        padding.append(0 if mask is None else int((~mask[1]).sum()))
        decode(batch, alone, 1)
    assert padding == [2] * 11 + [1, 0, 0]
    assert (batch.size(), batch.make_mask(1), batch.make_mask(4)) == (14, None, "causal")


@pytest.mark.parametrize("policy", ["h2o", "keydiff"])
def test_what_is_handed_out_is_what_attention_reads(policy):
    """Outside of routing others read arrays, with padding on the left."""
    batch, alone = pair(config(policy), [1, 2])
    chunk(batch, alone, [20, 6], step=16)
    for _ in range(4):
        mask = batch.make_mask(1)
        queries, *rows = (np.stack(part) for part in zip(*(o.next(1) for o in alone), strict=True))
        keys, values = batch.update_and_fetch(*(mx.array(row) for row in rows))
        given = {"scale": 0.2, "mask": mask}
        expected = mx.fast.scaled_dot_product_attention(mx.array(queries), keys, values, **given)
        out = batch.attend(mx.array(queries), keys, values, **given)
        np.testing.assert_allclose(np.array(out), np.array(expected), rtol=1e-4, atol=2e-5)


def test_nothing_is_lost_on_the_way_through_a_state():
    batch, alone = pair(config(), [1, 2])
    chunk(batch, alone, [10, 4], step=16)
    decode(batch, alone, 5)
    others = [
        (copied, copy.deepcopy(alone))
        for copied in (type(batch).from_state(batch.state), copy.deepcopy(batch))
    ]
    decode(batch, alone, 5)
    for other, its in others:
        assert (other.offset.tolist(), other.evicted) == ([15, 9], 1)
        decode(other, its, 5)
        check_packed(other, its)
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.state\] found 1 parts, expected 5"):
        type(batch).from_state((1,))


def test_a_batch_below_its_budget_may_be_trimmed():
    batch, alone = pair(config(), [1, 2])
    chunk(batch, alone, [8, 4], step=16)
    assert batch.is_trimmable()
    assert batch.trim(2) == 2
    for one in alone:
        one.cache.size()  # rows leave the newest ones when somebody asks, as the batch did
        one.cache.trim(2)
    check_packed(batch, alone)
    decode(batch, alone, 14)
    check_packed(batch, alone)
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.trim\] this cache has evicted rows"):
        batch.trim(1)


def test_bytes_and_size():
    batch, alone = pair(config(), [1, 2])
    assert (batch.empty(), batch.nbytes, batch.size(), batch.scores) == (True, 0, 0, None)
    chunk(batch, alone, [40, 7], step=40)
    assert not batch.empty()
    assert (batch.size(), batch.nbytes) == (14, sum(one.cache.nbytes for one in alone))
    assert batch.scores.shape == batch.positions.shape == (2, HEADS, 14)
    assert (np.array(batch.positions)[1, :, :7] == -1).all()  # padding is shown, not stored
    assert np.isnan(np.array(batch.scores)[1, :, :7]).all()


@pytest.mark.parametrize("policy", ["h2o", "window", "keydiff"])
def test_the_graph_of_a_step_does_not_grow(policy, tmp_path):
    batch, alone = pair(config(policy), [1, 2])
    chunk(batch, alone, [10, 4], step=16)
    edges = []
    for step in range(60):
        decode(batch, alone, 1)
        if step in (20, 55):
            file = tmp_path / "graph.dot"
            arrays = [part for group in batch._groups for part in group.store.arrays()]
            mx.export_to_dot(str(file), batch.positions, batch.scores, *arrays)
            edges.append(file.read_text().count("->"))
    assert edges[0] == edges[1] < 40


def test_batches_of_length_0_and_what_does_not_fit():
    batch, alone = pair(config(), [1, 2])
    chunk(batch, alone, [8, 4], step=16)
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.extend\] found the settings"):
        batch.extend(pair(config("window"), [1])[0])
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.extract\] index is 2"):
        batch.extract(2)
    batch.filter([])
    assert (batch.offset.shape, batch.size(), batch.nbytes) == ((0,), 0, 0)
    with pytest.raises(ValueError, match=r"expected B = 0 sequences"):
        batch.update_and_fetch(*[mx.zeros((1, HEADS, 1, SIZE))] * 2)
    batch.extend(pair(config(), [5])[0])
    assert batch.offset.tolist() == [0]
    assert isinstance(batch, BatchH2OKVCache)


def test_scores_that_do_not_come():
    batch, _ = pair(config(), [1, 2])
    rows = [mx.zeros((2, HEADS, 1, SIZE))] * 2
    batch.update_and_fetch(*rows)
    with pytest.raises(RuntimeError, match="got no scores for its last update"):
        batch.update_and_fetch(*rows)
