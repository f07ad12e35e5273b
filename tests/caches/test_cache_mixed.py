"""Mixed precision: the newest rows dense, older ones packed once, the light half coarser."""

import mlx.core as mx
import numpy as np
import pytest

from cache_columns import COLUMNS, SIZE
from cache_courses import HEADS, Course
from cache_invariants import arrays_of
from mlx_h2o import H2OConfig, H2OKVCache, QuantizedH2OKVCache, make_prompt_cache, policies, routing
from mlx_h2o.caches import attention
from mlx_h2o.caches.views import true_rows
from mlx_h2o.operations.composed.merging import recoded
from readings import in_parts
from tiny_models import random_prompt, tiny_qwen3

MIXED = [name for name, column in COLUMNS.items() if column.mixed]
BY_RANK, BY_PART = "8 and 4", "K8 V4, newest dense"


def segments(cache) -> list[tuple[int, int | None, int | None]]:
    """Of each segment, from the slots before: its rows, the bits of its keys and of its values."""
    keys, values = list(cache.keys), list(cache.values)
    found = []
    while len(keys) > 1:
        bits = [32 * part[0].shape[-1] // SIZE for part in (keys, values)]
        found.append((keys[0].shape[2], *bits))
        keys, values = keys[3:], values[3:]
    return [*found, (keys[0].shape[2], None, None)]


def bits_by_position(cache) -> dict[tuple[int, int], int]:
    """Of each head and position the bits of its key, 32 where it is dense."""
    bits = [width or 32 for rows, width, _ in segments(cache) for _ in range(rows)]
    positions = np.array(cache.positions)[0]
    return {(h, int(p)): bits[slot] for h in range(HEADS) for slot, p in enumerate(positions[h])}


# Codes


@pytest.mark.parametrize(("bits", "to"), [(8, 4), (8, 2), (4, 2), (4, 8), (2, 8), (8, 8)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_recoded_rows_keep_the_upper_bits_or_all(bits, to, dtype):
    rows = mx.random.normal((2, 3, 50, 128), key=mx.random.key(1)).astype(dtype)
    packed = mx.quantize(rows, group_size=64, bits=bits)
    again = recoded(packed, bits, to)
    expected = mx.quantize(rows, group_size=64, bits=to)
    assert [(a.shape, a.dtype) for a in again] == [(a.shape, a.dtype) for a in expected]
    before = mx.dequantize(*packed, group_size=64, bits=bits)
    after = mx.dequantize(*again, group_size=64, bits=to)
    if to >= bits:
        assert mx.array_equal(before, after).item()
        return
    widest = rows.reshape(2, 3, 50, 2, 64)
    widest = widest.max(axis=-1) - widest.min(axis=-1)
    wrong = mx.abs(after - rows).reshape(2, 3, 50, 2, 64).max(axis=-1)
    # Half a step of the new codes, a step of the old ones, and what the dtype rounds.
    bound = widest * (0.5 * 2 ** (bits - to) / (2**bits - 1) + 1 / (2**bits - 1)) + 4e-3
    assert mx.all(wrong <= bound).item()


@pytest.mark.parametrize(("bits", "to"), [(4, 8), (2, 4), (2, 8)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_rows_that_were_given_more_space_come_back_as_they_were(bits, to, dtype):
    rows = mx.random.normal((2, 3, 50, 128), key=mx.random.key(2)).astype(dtype)
    packed = mx.quantize(rows, group_size=64, bits=bits)
    again = recoded(recoded(packed, bits, to), to, bits)
    assert all(mx.array_equal(one, other).item() for one, other in zip(packed, again, strict=True))


# Which rows have which bits


@pytest.mark.matrix(4)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("policy", policies.names())
def test_the_newest_are_dense_and_the_rest_in_halves(policy, group):
    for column, tiers in ((BY_RANK, 2), (BY_PART, 1)):
        course = Course(column, policy, evict_every=group)
        course.chunk(30)
        for length in (1, 3, 12, 1, 1, 1, 1, 1, 30):
            course.chunk(length)
            course.flush()
            found = segments(course.cache)
            assert len(found) == tiers + 1
            assert 3 <= found[-1][0] < 3 + 3 + max(3, group)
            if tiers == 2:
                (heavy, *bits), (light, *coarse), _ = found
                assert (bits, coarse) == ([8, 8], [4, 4])
                assert 0 <= heavy - light <= 1
            else:
                assert found[0][1:] == (8, 4)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("column", MIXED)
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff"])
def test_no_row_gains_precision_and_none_is_packed_twice(policy, column, group):
    """A row that keeps its bits keeps its numbers; fewer bits are the upper ones of those."""
    course = Course(column, policy, evict_every=group)
    course.chunk(20)
    least = {}
    for length in (*[1] * 20, 3, 1, 9, *[1] * 10):
        course.chunk(length)
        errors = errors_by_position(course)
        for place, wrong in errors.items():
            assert wrong >= least.get(place, 0) - 1e-6  # never nearer to what came
        least = errors


def errors_by_position(course: Course) -> dict[tuple[int, int], float]:
    """By head and position, how far a stored key is from the one that came."""
    keys, _ = (np.array(rows) for rows in course.cache.keys_and_values())
    positions = np.array(course.cache.positions)[0]
    came = course.sequences[0].came[0]
    return {
        (h, int(p)): float(np.abs(keys[0, h, slot] - came[h, p]).max())
        for h in range(HEADS)
        for slot, p in enumerate(positions[h])
    }


def test_the_light_rows_are_those_of_lower_rank_when_they_leave():
    """A row that leaves the dense ones is light if it ranks below the heavy ones."""
    course = Course(BY_RANK, "h2o-ema", max_kv_size=20, recent_size=6, evict_every=4)
    course.chunk(20)
    course.tokens(12)
    seen = 0
    for _ in range(40):
        cache = course.cache
        before, slow = bits_by_position(cache), course.references[0]
        ranks = [
            dict(zip(positions, scores, strict=True))
            for positions, scores in zip(slow.positions(), slow.scores(), strict=True)
        ]
        course.chunk(1)
        after = bits_by_position(cache)
        left = {place for place, bits in before.items() if bits == 32 and place in after}
        for h in range(HEADS):
            by_bits = {
                bits: [ranks[h][p] for g, p in left if g == h and after[g, p] == bits]
                for bits in (8, 4)
            }
            if all(by_bits.values()):
                assert min(by_bits[8]) >= max(by_bits[4])
                seen += 1
    assert seen > 5


def test_as_published_the_recent_window_is_light_and_all_others_are_not():
    """8 bits for sinks and heavy rows, 4 for the recent ones (AtomGradient 2026)."""
    for group in (1, 4):
        course = Course("published", "h2o-ema", evict_every=group)
        course.chunk(30)
        course.flush()
        for _ in range(20):
            for (_, position), width in bits_by_position(course.cache).items():
                start = course.cache.offset - course.config.recent_size
                if width == 32:
                    assert position >= course.cache.offset - group  # waits for the next event
                elif width == 4:
                    assert position >= start - group + 1
                else:
                    assert position < start
            course.tokens(1)


# Attention, bytes, models


@pytest.mark.slow
@pytest.mark.matrix(2)
@pytest.mark.parametrize("column", MIXED)
@pytest.mark.parametrize("policy", ["h2o-ema", "keydiff"])
def test_a_batch_packs_each_sequence_as_alone(policy, column):
    """The same numbers, row by row."""
    batch = Course(column, policy, 2, evict_every=4)
    alone = [Course(column, policy, evict_every=4) for _ in range(2)]
    for course, sequence in zip(alone, batch.new(2, 0).sequences, strict=True):
        course.sequences = [sequence]
    for lengths, count in (([5, 17], 9), ([3, 3], 9), ([1, 30], 9)):
        batch.prompts(lengths)
        batch.tokens(count)
        for place, (course, length) in enumerate(zip(alone, lengths, strict=True)):
            course.chunk(length)
            course.tokens(count)
            found = batch.extract(place)
            course.flush()
            assert segments(found.cache) == segments(course.cache)
            assert errors_by_position(found) == errors_by_position(course)


def test_nbytes_counts_what_is_stored():
    packed = {8: SIZE + 8, 4: SIZE // 2 + 8}
    for column in (BY_RANK, BY_PART):
        course = Course(column, evict_every=1)
        course.chunk(40)
        course.flush()
        rows = sum(
            count * (2 * SIZE * 4 if bits is None else packed[bits] + packed[v_bits])
            for count, bits, v_bits in segments(course.cache)
        )
        stored = sum(array.nbytes for array in arrays_of(course.cache.state))
        assert stored == HEADS * (rows + 14 * 8 + 2 * SIZE * 4)  # and centres
        # The dense rows have room for a group more.
        assert stored <= course.cache.nbytes <= stored + HEADS * 6 * (2 * SIZE * 4 + 8)


@pytest.mark.parametrize("column", MIXED)
def test_no_row_is_unpacked_for_other_attention(column, monkeypatch):
    course = Course(column, "keydiff", evict_every=1)
    course.chunk(12)
    cache, (queries, rows) = course.cache, (mx.ones((1, n * HEADS, 1, SIZE)) for n in (2, 1))
    found = cache.update_and_fetch(rows, rows)
    monkeypatch.setattr(attention, "without_scores", pytest.fail)
    cache.attend(queries, *found, scale=0.2, stock=pytest.fail)


def test_in_a_model():
    """Close to the dense cache's logits, the same inside and outside of routing."""
    model = tiny_qwen3(head_dim=32)
    prompt = random_prompt(60)
    by_rank = {"kv_bits": 8, "light_bits": 4, "kv_group_size": 32, "dense_size": 4}
    found = []
    for settings_of, routed in (({}, True), (by_rank, True), (by_rank, False)):
        given = {"max_kv_size": 64, "recent_size": 20, "policy": "keydiff"}
        caches = make_prompt_cache(model, **given, **settings_of)
        with routing(model) if routed else mx.stream(mx.cpu):
            found.append(np.array(in_parts(model, caches, prompt, 30)[0]))
    np.testing.assert_allclose(found[1], found[2], rtol=0, atol=1e-3)
    off = np.abs(found[1] - found[0]).max(axis=-1)
    assert off[:29].max() < 1e-3  # nothing is packed before the first chunk is over
    assert off.max() < 0.3 * np.abs(found[0]).max()


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_chunk_below_the_budget_is_packed_at_once(sequences):
    """Or it would take more bytes than a full cache."""
    course = Course("8 and 4", batch=sequences)
    course.chunk(12)
    assert course.cache._table.tail.rows == [3] * sequences
    assert course.cache.is_trimmable()
    course.trim(4)
    course.tokens(8)


@pytest.mark.parametrize("policy", ["h2o", "keydiff"])
def test_sequences_of_unlike_packed_rows_and_as_many_new_ones_see_their_own(policy):
    for first, second in ((3, 12), (14, 4), (9, 7)):
        sizes = {"sink_size": 0, "recent_size": 5, "heavy_size": 2, "max_kv_size": 7}
        course = Course("8 and 4", policy, 1, evict_every=4, **sizes)
        course.prompts([first])
        other = course.new(1, second)
        other.prompts([second])
        course.extend(other)
        course.tokens(20)


# The newest rows, as they came, of an unbounded cache


@pytest.mark.parametrize(("bits", "v_bits"), [(5, 4), (8, 4), (6, 3)])
def test_all_rows_but_the_newest_are_those_of_a_cache_that_packs_at_once(bits, v_bits):
    settings = {"max_kv_size": None, "kv_bits": bits, "v_bits": v_bits, "kv_group_size": 32}
    plain, cache = (
        QuantizedH2OKVCache(H2OConfig.of(**settings, dense_size=size)) for size in (0, None)
    )
    rows = mx.random.normal((2, 1, HEADS, 120, SIZE), key=mx.random.key(3))
    start = 0
    for count in (70, *[1] * 45, 5):
        for one in (plain, cache):
            one.update_and_fetch(*rows[:, :, :, start : start + count])
        start += count
    assert not hasattr(cache, "bits")  # the last rows were handed out as arrays
    for side in ("keys", "values"):
        found, expected = (true_rows(one._table, side) for one in (cache, plain))
        came = rows[int(side == "values")]
        packed = cache._table.packed_width
        assert 8 <= start - packed < 8 + 32 + 5
        assert mx.allclose(found[:, :, :packed], expected[:, :, :packed], atol=1e-6).item()
        assert mx.allclose(found[:, :, packed:], came[:, :, packed:], atol=1e-5).item()
        assert not mx.allclose(found[:, :, :packed], came[:, :, :packed], atol=1e-3).item()
    again = QuantizedH2OKVCache(cache.config)
    again.state = cache.state
    assert cache.trim(20) == again.trim(20) == 20
    assert mx.array_equal(true_rows(cache._table, "keys"), true_rows(again._table, "keys")).item()
    assert cache.size() == 100


def test_the_sequences_of_a_batch_that_evicts_nothing_are_packed_together():
    """Each behind its own rows, which the first time are copied."""
    rows, both = mx.random.normal((2, 2, HEADS, 200, 64), key=mx.random.key(4)), []
    for size in (8, 0):
        config = H2OConfig.of(max_kv_size=None, kv_bits=4, dense_size=size)
        caches = [QuantizedH2OKVCache(config) for _ in range(2)]
        for place, (cache, count) in enumerate(zip(caches, (10, 0), strict=True)):
            for length in (60, *[1] * count):
                cache.update_and_fetch(*rows[:, place : place + 1, :, :length])
        both.append(H2OKVCache.merge(caches))
    batch = both[0]
    for newest in (18, 8), (40, 30), (9, 9), (40, 40), (9, 9):
        while batch._table.tail.rows[0] != newest[0]:
            at = batch._table.tokens[0]
            for one in both:
                one.update_and_fetch(*rows[:, :, :, at : at + 1])
        assert batch._table.tail.rows == [*newest]
    for place in range(2):
        one, other = (cache.extract(place) for cache in both)
        assert np.array(one.positions).tolist() == np.array(other.positions).tolist()
        found, expected = (true_rows(each._table, "keys") for each in (one, other))
        packed = one._table.packed_width
        assert mx.allclose(found[:, :, :packed], expected[:, :, :packed], atol=1e-6).item()


@pytest.mark.parametrize("policy", ["h2o", "keydiff"])
def test_rows_are_packed_beside_drafts_before_any_goes(policy):
    course = Course("8 and 4", policy, speculative=3, evict_every=4)
    course.chunk(9)
    course.draft(1, 3)
    course.draft(4, 0)
