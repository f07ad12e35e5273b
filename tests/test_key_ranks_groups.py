"""keydiff in one read where rows go in groups, in batches, and behind chunks."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_checks import SCALE, exact_trace, rows_by_position
from key_reads import SecondReadError, forbid_second_reads
from mlx_h2o import BatchH2OKVCache, H2OConfig, H2OKVCache, fast
from mlx_h2o.caches import key_ranks
from mlx_h2o.caches.key_ranks import KeyRanks
from mlx_h2o.caches.quantized_cache import evicting_cache


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    for name in ("SECOND_READ_BYTES", "GROUP_READ_BYTES", "DRAFT_READ_BYTES"):
        monkeypatch.setattr(key_ranks, name, -1)


def keydiff(size: int, every: int = 1, **given) -> H2OConfig:
    chosen = {"sink_size": 1, "recent_size": 1, "policy": "keydiff"} | given
    return H2OConfig(max_kv_size=size, evict_every=every, **chosen)


def attend(cache, queries, keys, values, *, routed: bool = True) -> None:
    """A step as routed attention makes it; not routed: attention that says nothing."""
    length = keys.shape[2]
    mask = cache.make_mask(length)
    k, v = cache.update_and_fetch(mx.array(keys), mx.array(values))
    if routed and cache.ranks_keys(mx.array(queries), k):
        mx.eval(cache.attend(mx.array(queries), k, v, scale=SCALE, mask=mask))
    else:
        mx.eval(k, v)


def kept(cache) -> dict:
    return rows_by_position(cache)[0]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    size=st.integers(3, 8),
    every=st.integers(1, 5),
    shared_heads=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_rows_that_go_in_groups_are_those_of_a_second_read(data, size, every, shared_heads, seed):
    """Keys with many ties, chunks between tokens, steps without routing."""
    lengths = data.draw(st.lists(st.sampled_from([1] * 6 + [2, 3, 5]), min_size=6, max_size=30))
    routed = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    config = keydiff(size, every, sink_size=data.draw(st.integers(0, 2)), shared_heads=shared_heads)
    rng = np.random.default_rng(seed)
    _, keys = exact_trace(rng, lengths)
    if shared_heads:  # the mean over heads rounds, which would break ties
        keys = rng.standard_normal(keys.shape).astype(np.float32)
    ours, theirs = H2OKVCache(config), H2OKVCache(config)
    start = 0
    for length, with_attention in zip(lengths, routed, strict=True):
        part = keys[:, :, start : start + length]
        start += length
        queries = np.ones((2, 4, length, 4), np.float32)
        attend(ours, queries, part, part, routed=with_attention)
        attend(theirs, queries, part, part, routed=False)
        assert kept(ours) == kept(theirs)


def tokens(rng, batch: int, length: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = ((batch, 4, length, 32), (batch, 2, length, 32), (batch, 2, length, 32))
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


@pytest.mark.parametrize("bits", [None, 8])
def test_groups_of_rows_go_without_a_second_read(monkeypatch, bits):
    """Rows that come and rows that go are read, and no others."""
    rng = np.random.default_rng(2)
    cache = evicting_cache(keydiff(16, 4, kv_bits=bits, kv_group_size=32))
    for _ in range(19):
        attend(cache, *tokens(rng, 1))
    forbid_second_reads(monkeypatch, few=4)
    for _ in range(40):
        attend(cache, *tokens(rng, 1))
    assert cache.evicted == 40
    with pytest.raises(SecondReadError):  # unrouted, the check sees the read
        for _ in range(5):
            attend(cache, *tokens(rng, 1), routed=False)


def test_the_surplus_of_a_short_chunk_goes_without_a_second_read(monkeypatch):
    rng = np.random.default_rng(3)
    cache = H2OKVCache(keydiff(16))
    for _ in range(20):
        attend(cache, *tokens(rng, 1))
    forbid_second_reads(monkeypatch, few=5)
    for _ in range(10):
        attend(cache, *tokens(rng, 1, 5))
        assert cache.size() == 16
    assert cache.evicted == 54


@pytest.mark.parametrize("bits", [None, 8])
def test_statistics_of_groups_are_exact_for_long(monkeypatch, bits):
    fresh = []
    of = KeyRanks.of
    monkeypatch.setattr(KeyRanks, "of", classmethod(lambda cls, *a: fresh.append(1) or of(*a)))
    rng = np.random.default_rng(4)
    cache = evicting_cache(keydiff(16, 3, kv_bits=bits, kv_group_size=32))
    for _ in range(16 + 2 + 3 * 400):
        attend(cache, *tokens(rng, 1))
    assert len(fresh) == 2  # the first, and once after 1,024 rows
    expected = np.array(fast.key_diversity(cache._store.dense()[0]))
    np.testing.assert_allclose(np.array(cache.scores), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("sequences", [1, 2])
def test_nothing_hangs_on_what_is_known(tmp_path, bits, sequences):
    """Whoever evaluates the keys evaluates the statistics: untied, they would hold the rows of
    before a compaction until the next one."""
    rng = np.random.default_rng(6)
    config = keydiff(16, 4, kv_bits=bits, kv_group_size=32)
    cache = evicting_cache(config)
    if sequences == 2:
        cache = BatchH2OKVCache.merge([alone(config, rows, rng) for rows in (16, 12)])
    for _ in range(30):
        attend(cache, *tokens(rng, sequences))
        known = cache._key_ranks
        if known is not None:
            mx.export_to_dot(str(tmp_path / "graph.dot"), *known.statistics)
            assert "label" not in (tmp_path / "graph.dot").read_text().replace('label=""', "")
    assert known is not None and cache.evicted >= 12


def alone(config: H2OConfig, rows: int, rng) -> H2OKVCache:
    cache = evicting_cache(config)
    if rows:
        attend(cache, *tokens(rng, 1, rows))
    return cache


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    every=st.sampled_from([1, 1, 2, 3]),
    bits=st.sampled_from([None, 8]),
    seed=st.integers(0, 2**16),
)
def test_the_sequences_of_a_batch_keep_what_they_keep_alone(data, every, bits, seed):
    """Ragged sequences, chunks with padding on the right, sequences that leave and come."""
    rng = np.random.default_rng(seed)
    config = keydiff(
        8, every, kv_bits=bits, kv_group_size=32, sink_size=data.draw(st.integers(0, 2))
    )
    lengths = data.draw(st.lists(st.integers(1, 14), min_size=2, max_size=4))
    singles = [alone(config, length, rng) for length in lengths]
    batch = BatchH2OKVCache.merge(singles)
    events = ["token"] * 8 + ["chunk", "leave", "join", "unrouted", "copy"]
    for event in data.draw(st.lists(st.sampled_from(events), min_size=6, max_size=24)):
        count = len(singles)
        if event == "leave" and count > 1:
            gone = data.draw(st.integers(0, count - 1))
            stay = [place for place in range(count) if place != gone]
            batch.filter(stay)
            singles = [singles[place] for place in stay]
        elif event == "join" and count < 4:
            one = alone(config, data.draw(st.integers(1, 12)), rng)
            batch.extend(BatchH2OKVCache.merge([one]))
            singles.append(one)
        elif event == "copy":
            batch = copy.deepcopy(batch)
        elif event == "chunk":
            given = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
            longest = max(given)
            parts = tokens(rng, count, longest)
            batch.prepare(lengths=given, right_padding=[longest - one for one in given])
            attend(batch, *parts)
            batch.finalize()
            for place, length in enumerate(given):
                own = [part[place : place + 1, :, :length] for part in parts]
                attend(singles[place], *own, routed=False)
        elif event in ("token", "unrouted"):
            parts = tokens(rng, count)
            attend(batch, *parts, routed=event == "token")
            for place, one in enumerate(singles):
                attend(one, *[part[place : place + 1] for part in parts], routed=False)
        for place, one in enumerate(singles):
            assert one.size() == batch.extract(place).size()  # the surplus of a chunk goes
            assert kept(batch.extract(place)) == kept(one)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_batch_evicts_without_a_second_read(monkeypatch, bits, every):
    """Sequences of their own lengths, which get their rows at their own times."""
    rng = np.random.default_rng(5)
    config = keydiff(16, every, kv_bits=bits, kv_group_size=32, sink_size=2)
    batch = BatchH2OKVCache.merge([alone(config, rows, rng) for rows in (30, 16, 9)])
    for _ in range(every):
        attend(batch, *tokens(rng, 3))
    before = batch.evicted
    forbid_second_reads(monkeypatch, few=max(2, every))
    for _ in range(30):
        attend(batch, *tokens(rng, 3))
    assert batch.evicted > before + 3 * 20
    with pytest.raises(SecondReadError):
        for _ in range(4):
            attend(batch, *tokens(rng, 3), routed=False)
