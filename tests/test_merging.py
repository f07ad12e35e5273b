"""Rows that merge: none is lost, none that is protected changes, and duplicates cost nothing.

That each step is the slow reference's is what the suites of all policies say.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import reference
from cache_checks import SCALE
from cache_columns import MERGING, columns_of, rounded, stored_rows
from cache_courses import Course
from cache_invariants import check_same, seen_from_outside
from mlx_h2o import (
    H2OConfig,
    H2OKVCache,
    load_prompt_cache,
    make_prompt_cache,
    routing,
    save_prompt_cache,
    use_backend,
)
from mlx_h2o.operations import merging, native
from mlx_h2o.operations.segments import biased_attention
from tiny_models import random_prompt, tiny_qwen3

COLUMNS = columns_of("merge")
BACKENDS = [
    "composed",
    pytest.param(
        "native",
        marks=pytest.mark.skipif(native.unavailable_reason() != "", reason="no native back end"),
    ),
]


def counts_of(cache) -> np.ndarray:
    """How many rows each stored row is, [B, H, N]; 0 in unused slots."""
    counts = np.exp(np.array(cache.scores, np.float64))
    return np.where(np.array(cache.positions) >= 0, counts, 0)


def check_counts(course: Course) -> None:
    """Every token seen is in one row of each head, and a row is a whole number of them."""
    counts = counts_of(course.cache)
    np.testing.assert_allclose(counts, np.rint(counts), rtol=1e-4)
    for total, one in zip(counts.sum(axis=2), course.references, strict=True):
        np.testing.assert_allclose(total, one.offset, rtol=1e-4)


# What is kept


def test_the_suites_know_what_merges():
    assert MERGING == ("merge",)
    packed = ("8 bits", "plain 8 bits", "4 bits", "K8 V4", "arrays")
    assert ("dense", *packed, "turbo3", "turbo8v4", "turbo0v2") == COLUMNS


@pytest.mark.slow
@pytest.mark.matrix(2)
@pytest.mark.parametrize("evict_every", [1, 4, 16])
@pytest.mark.parametrize("column", ["dense", "8 bits", "4 bits"])
def test_no_token_is_lost(column, evict_every):
    """Nor where a group is as large as can be: one row stays that the others go into."""
    course = Course(column, "merge", evict_every=evict_every)
    for length in (5, *[1] * 30, 40, 1, 3, 100, *[1] * 9):
        course.chunk(length)
        check_counts(course)
        if length == 1:
            assert course.cache.size() <= 14
    course.chunk(50)
    course.flush()
    assert course.cache.size() == 14
    check_counts(course)
    # Nearly all was compared, and not followed; codes of 4 bits are often the same.
    assert course.followed <= course.cache.updates // 10


@pytest.mark.slow
@pytest.mark.parametrize("shared_heads", [False, True])
def test_no_token_of_a_batch_is_lost(shared_heads):
    course = Course("8 bits", "merge", 3, evict_every=4, shared_heads=shared_heads)
    course.prompts([5, 30, 18], step=12)
    for _ in range(20):
        course.tokens(1)
        check_counts(course)


@pytest.mark.slow
@pytest.mark.matrix(3)
@pytest.mark.parametrize("speculative", [0, 3])
@pytest.mark.parametrize("column", COLUMNS)
def test_sinks_and_the_recent_window_are_as_they_came(column, speculative):
    course = Course(column, "merge", evict_every=4, speculative=speculative)
    protected = 0
    for length in (20, *[1] * 30, 30, *[1] * 7):
        course.chunk(length)
        cache, config = course.cache, course.config
        positions, counts = np.array(cache.positions)[0], counts_of(cache)[0]
        for stored, came, bits in zip(
            stored_rows(cache), course.sequences[0].came, course.bits, strict=True
        ):
            for head, slot in np.ndindex(*positions.shape):
                at = positions[head, slot]
                if config.sink_size <= at < cache.offset - config.recent_size:
                    continue
                protected += 1
                assert counts[head, slot] == 1
                expected = rounded(came[head, at][None], bits)[0]
                np.testing.assert_array_equal(stored[0, head, slot], expected)
    assert protected > 500


@pytest.mark.parametrize("max_kv_size", [None, 60])
@pytest.mark.parametrize("column", ["dense", "8 bits"])
def test_while_nothing_goes_it_is_keydiff(column, max_kv_size):
    """To the bit: no bias is added where no row stands for more than one."""
    sizes = {"recent_size": None, "sink_size": 2, "max_kv_size": max_kv_size}
    bits = {} if column == "dense" else {"kv_bits": 8, "kv_group_size": 32}
    found = []
    for policy in ("merge", "keydiff"):
        cache = H2OKVCache if column == "dense" else type(Course(column).cache)
        cache = cache(H2OConfig(policy=policy, **sizes, **bits))
        outs, rng = [], np.random.default_rng(4)
        for length in (20, 1, 5, *[1] * 34):
            tokens = [mx.array(rng.standard_normal((1, h, length, 32)), mx.float32) for h in (4, 2)]
            k, v = cache.update_and_fetch(tokens[1], tokens[1])
            mask = "causal" if length > 1 else None
            outs.append(cache.attend(tokens[0], k, v, scale=SCALE, mask=mask))
            assert cache.row_bias is None
        rows = [*stored_rows(cache), np.array(cache.positions)]
        found.append([np.array(mx.concatenate(outs, axis=2)), *rows])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


# What attention is told


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("evict_every", [1, 3])
@pytest.mark.parametrize("lengths", [[1] * 60, [30, *[1] * 20, 10], [60]])
def test_duplicates_are_exact(lengths, evict_every, backend):
    """Identical rows merge first and cost nothing: attention is that over all tokens."""
    rng = np.random.default_rng(3)
    kinds = rng.standard_normal((2, 1, 2, 5, 16)).astype(np.float32)
    which = rng.integers(0, 5, sum(lengths) + 3)
    keys, values = kinds[:, :, :, which]
    queries = rng.standard_normal((1, 4, len(which), 16)).astype(np.float32)
    sizes = {"max_kv_size": 14, "sink_size": 2, "recent_size": 4, "evict_every": evict_every}
    cache = H2OKVCache(H2OConfig(policy="merge", **sizes))
    start, merged = 0, 0
    with use_backend(backend):
        for length in (*lengths, 3):
            part = (slice(None), slice(None), slice(start, start + length))
            start += length
            mask = cache.make_mask(length)
            k, v = cache.update_and_fetch(mx.array(keys[part]), mx.array(values[part]))
            out = cache.attend(mx.array(queries[part]), k, v, scale=SCALE, mask=mask)
            merged = max(merged, counts_of(cache).max())
            seen = (slice(None), slice(None), slice(start))
            expected = reference.attention(
                queries[part], keys[seen], values[seen], scale=SCALE, mask="causal"
            )
            np.testing.assert_allclose(np.array(out), expected.out, rtol=0, atol=2e-5)
    assert merged > 5


def test_the_mean_is_weighted_by_count_and_by_how_unlike_the_key_is():
    """Two of three rows that may merge, by hand: keys along axes, means of them."""
    sizes = {"max_kv_size": 4, "sink_size": 1, "recent_size": 1, "evict_every": 1}
    cache = H2OKVCache(H2OConfig(policy="merge", **sizes))
    keys = np.array([[0, 4], [3, 0], [3, 1.5], [-1, 4], [0, 4]], np.float32)
    values = np.full((5, 2), 0.01, np.float32) * np.arange(5, dtype=np.float32)[:, None]
    for row in zip(keys, values, strict=True):
        k, v = cache.update_and_fetch(*(mx.array(part)[None, None, None] for part in row))
        cache.attend(k[:, :, -1:], k, v, scale=1.0)
    assert sorted(np.array(cache.positions)[0, 0].tolist()) == [0, 1, 3, 4]
    directions = keys[:4] / np.linalg.norm(keys[:4], axis=1, keepdims=True)
    mean = directions.mean(axis=0)
    masses = np.exp(-3 * directions @ mean / np.linalg.norm(mean))[1:3]
    assert masses[0] > 2 * masses[1]
    slot = int(np.argmax(np.array(cache.positions)[0, 0] == 1))
    for found, rows in ((cache.keys, keys), (cache.values, values)):
        expected = (masses / masses.sum()) @ rows[1:3]
        np.testing.assert_allclose(np.array(found)[0, 0, slot], expected, rtol=1e-5)
    np.testing.assert_allclose(counts_of(cache)[0, 0, slot], 2, rtol=1e-6)


@pytest.mark.matrix(12)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", ["", "causal", "bool", "additive", "one row"])
@pytest.mark.parametrize("length", [1, 8, 128, 129, 300])
def test_a_long_chunk_sees_the_bias_too(length, masked, backend):
    """Blocks of queries where a back end makes a matrix of their logits: no query is left out."""
    rng = np.random.default_rng(length)
    rows = length + 20
    q, k, v = (
        rng.standard_normal((2, h, n, 32)).astype(np.float32)
        for h, n in ((4, length), (2, rows), (2, rows))
    )
    bias = np.log(rng.integers(1, 40, (2, 2, rows + 7))).astype(np.float32)
    sinks = rng.standard_normal(4).astype(np.float32)
    causal = np.tri(length, rows, rows - length, dtype=bool)
    shape = (1, rows) if masked == "one row" else (2, 1, length, rows)
    shown = np.ones(shape, bool) & (causal if masked == "bool" else True)
    shown &= rng.random(shape) < 0.8
    shown[..., 0] = True
    mask = {"": None, "causal": "causal", "bool": shown, "one row": shown}.get(masked)
    if masked == "additive":
        mask = np.where(shown, rng.standard_normal(shown.shape), -np.inf).astype(np.float32)
    with use_backend(backend):
        given = mx.array(mask) if isinstance(mask, np.ndarray) else mask
        found, lse = biased_attention(
            *(mx.array(part) for part in (q, k, v)), mx.array(bias),
            scale=SCALE, mask=given, sinks=mx.array(sinks), return_lse=True,
        )  # fmt: skip
    allowed, added = reference.masked_pairs(given, (2, 4, length, rows))
    logs = np.repeat(bias[:, :, None, :rows], 2, axis=1) + added
    both = np.where(allowed, -np.inf, logs).astype(np.float32)
    expected = reference.attention(q, k, v, scale=SCALE, mask=both, sinks=sinks)
    np.testing.assert_allclose(np.array(found), expected.out, rtol=0, atol=3e-5)
    np.testing.assert_allclose(np.array(lse), expected.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(native.unavailable_reason() != "", reason="needs the native back end")
@pytest.mark.parametrize("kv_bits", [None, 8])  # a code of 4 bits that falls otherwise is a lot
def test_a_model_is_the_same_on_every_back_end(kv_bits):
    """Prompts longer than a block, steps and chunks, over rows that have merged."""
    model = tiny_qwen3(head_dim=32)
    prompt, found = random_prompt(400), []
    for backend in ("composed", "native"):
        caches = make_prompt_cache(
            model,
            40,
            policy="merge",
            kv_bits=kv_bits,
            kv_frame=False,
            kv_group_size=32,
            recent_size=10,
        )
        logits, start = [], 0
        with routing(model), use_backend(backend):
            for length in (60, *[1] * 10, 200, 4, *[1] * 4):
                tokens = mx.array(prompt[start : start + length])[None]
                logits.append(model(tokens, cache=caches)[0])
                mx.eval(logits[-1], [cache.state for cache in caches])
                start += length
        assert counts_of(caches[0]).max() > 4
        found.append((np.array(mx.concatenate(logits)), np.array(caches[1].positions)))
    (one, places), (other, others) = found
    np.testing.assert_array_equal(places, others)
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-3 * np.abs(one).max())


# Batches, drafts, files


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("evict_every", [1, 4, 8])
@pytest.mark.parametrize("column", ["dense", "8 bits"])
@pytest.mark.parametrize("step", [1, 7, 64])
def test_a_batch_merges_each_sequence_as_alone(column, evict_every, step):
    """Also while others get padding: how many go at a time is a question of the sequence."""
    batch = Course(column, "merge", 3, evict_every=evict_every)
    lengths = [9, 40, 23]
    batch.prompts(lengths, step=step)
    batch.tokens(9)
    for place, length in enumerate(lengths):
        alone = Course(column, "merge", evict_every=evict_every)
        alone.sequences = batch.new(3, 0).sequences[place : place + 1]
        for first in range(0, length, step):
            alone.chunk(min(step, length - first))
        alone.tokens(9)
        alone.flush()
        found = batch.extract(place)
        for name in ("positions", "scores"):
            ours, theirs = (np.array(getattr(one.cache, name)) for one in (found, alone))
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(stored_rows(found.cache), stored_rows(alone.cache), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("column", ["dense", "8 bits"])
def test_rejected_drafts_leave_merged_rows_as_they_are(column):
    course = Course(column, "merge", speculative=3, evict_every=4)
    course.chunk(30)
    merged = 0
    for _ in range(8):
        course.chunk(1, 3)
        cache = course.cache
        size = cache.size() - 3
        before = [np.array(a)[:, :, :size] for a in (*stored_rows(cache), cache.scores)]
        course.trim(3)
        after = [*stored_rows(cache), np.array(cache.scores)]
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)
        merged = max(merged, counts_of(cache).max())
        check_counts(course)
    assert merged > 4


@pytest.mark.matrix(4)
@pytest.mark.parametrize("how", ["copy", "state", "file"])
@pytest.mark.parametrize("column", ["dense", "4 bits"])
@pytest.mark.parametrize("tokens", [5, 40])
def test_what_was_saved_goes_on(column, how, tokens, tmp_path):
    course = Course(column, "merge", evict_every=4)
    course.tokens(tokens)
    if how == "file":
        save_prompt_cache(tmp_path / "cache", [course.cache])
        twin = course.copied()
        (twin.cache,) = load_prompt_cache(tmp_path / "cache")
    else:
        twin = course.copied(how)
    for one in (course, twin):  # each compares its outputs with the reference's
        for length in (1, 4, 12, 1, 1):
            one.chunk(length)
    found, expected = (seen_from_outside(one.cache) for one in (twin, course))
    for name in ("nbytes", "settings"):  # a copy has no more room than it needs
        del found[name], expected[name]
    check_same(found, expected)


# What is refused, and what there is no room for


def test_outside_of_routing_the_next_update_is_an_error():
    model = tiny_qwen3(head_dim=32)
    caches = make_prompt_cache(model, 16, policy="merge")
    model(mx.array(random_prompt(4))[None], cache=caches)
    with pytest.raises(
        RuntimeError, match=r"got no attention of mlx_h2o's .*'merge' needs it.*routing"
    ):
        model(mx.array(random_prompt(4))[None], cache=caches)
    assert caches[0].offset == 4  # nothing was done


@pytest.mark.parametrize(
    "given",
    [
        {"kv_bits": 8, "light_bits": 4},
        {"kv_bits": 8, "dense_size": 4},
        {"kv_bits": 8, "kv_handed": "latents"},
        {"kv_handed": "latents"},
    ],
)
def test_settings_that_are_refused(given):
    with pytest.raises(ValueError) as error:
        H2OConfig(policy="merge", **given)
    assert str(error.value) == (
        "[H2OConfig] policy is 'merge', expected one that evicts, with light_bits, with dense_size "
        "and for latent attention."
    )


@pytest.mark.parametrize("column", ["dense", "8 bits"])
def test_a_row_without_a_partner_is_dropped(column):
    """Where all but one row are protected it is a window, and the budget holds."""
    given = {"max_kv_size": 4, "sink_size": 1, "recent_size": 3, "heavy_size": 0}
    course = Course(column, "merge", **given)
    for length in (1, 1, 3, *[1] * 6, 9, 1, 1):
        course.chunk(length)
        if length == 1:
            assert course.cache.size() <= 4
    course.flush()
    newest = course.cache.offset
    for found in np.array(course.cache.positions)[0].tolist():
        assert sorted(found) == [0, *range(newest - 3, newest)]
    assert counts_of(course.cache).sum(axis=2).max() < newest


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_smallest_budgets_hold(budget):
    course = Course("dense", "merge", max_kv_size=budget, sink_size=0, recent_size=1)
    for length in (1, 1, 1, 4, 1, 1, 9, 1):
        course.chunk(length)
        if length == 1:
            assert course.cache.size() <= budget


# Pairs


@pytest.mark.parametrize("shared", [False, True])
def test_partners_are_the_cheapest_pairs_in_blocks_or_at_once(shared, monkeypatch):
    rng = np.random.default_rng(1)
    vectors = mx.array(rng.standard_normal((2, 3, 53, 12)), mx.float32)
    mass = mx.array(rng.uniform(0.1, 5, (2, 3, 53)), mx.float32)
    free = np.broadcast_to(rng.random((2, 1, 53)) < 0.7, (2, 3, 53))
    m, z = np.array(mass, np.float64), np.array(vectors, np.float64)
    apart = np.square(z[:, :, :, None] - z[:, :, None]).sum(axis=-1)
    one, other = m[..., None], m[:, :, None]
    cost = np.sqrt(one * other / (one + other)) * apart
    if shared:
        cost = np.broadcast_to(cost.mean(axis=1, keepdims=True), cost.shape)
    pairs = np.triu(np.ones((53, 53), bool), 1) & free[..., None] & free[:, :, None]
    cost = np.where(pairs, cost, np.inf)
    for together in (1 << 19, 1):
        monkeypatch.setattr(merging, "_PAIRS", together)
        costs, slots = merging.partners(vectors, mass, mx.array(free), shared)
        np.testing.assert_allclose(np.array(costs), cost.min(axis=-1), rtol=1e-4)
        has = np.isfinite(cost.min(axis=-1))
        np.testing.assert_array_equal(np.array(slots)[has], cost.argmin(axis=-1)[has])


def test_rows_follow_their_partners_to_one_that_stays():
    """0 -> 1 -> 3 -> 6 in a chain; 2 has no partner; 5 goes to 6 itself."""
    costs = mx.array([[[1.0, 1.0, np.inf, 1.0, 9.0, 1.0, np.inf]]])
    slots = mx.array([[[1, 3, 0, 6, 6, 6, 0]]], mx.uint32)
    going = mx.array([[[0, 1, 2, 3, 5]]], mx.uint32)
    assert merging.targets(going, costs, slots).tolist() == [[[6, 6, 2, 6, 6]]]
    assert merging.others(mx.array([[[4, 6]]], mx.uint32), 7).tolist() == going.tolist()


@pytest.mark.parametrize("chain", [1, 2, 7, 8, 9, 31])
def test_a_chain_of_any_length_is_followed(chain):
    rows = chain + 1
    costs = mx.array([[[*[1.0] * chain, np.inf]]])
    slots = mx.array([[[*range(1, rows), 0]]], mx.uint32)
    going = mx.arange(chain, dtype=mx.uint32)[None, None]
    assert merging.targets(going, costs, slots).tolist() == [[[chain] * chain]]
