"""Folded rows: no token is lost, no protected row changes, and duplicates cost nothing.

The suites of all policies check that each step agrees with the slow reference.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import reference
from back_ends import BACKENDS, NATIVE
from cache_checks import SCALE
from cache_columns import COLUMNS, FOLDING, rounded, stored_rows
from cache_courses import Course
from cache_folded import counts_of as counts_of_slots
from cache_folded import everything_folds
from mlx_h2o import H2OConfig, H2OKVCache, fast, make_prompt_cache, policies, routing, use_backend
from mlx_h2o.operations.backends import get, resolve
from mlx_h2o.operations.composed import folding
from mlx_h2o.operations.segments import AttentionRows, merged_attention
from readings import in_parts
from tiny_models import random_prompt, tiny_qwen3

FOLDED = tuple(name for name, one in COLUMNS.items() if not (one.mixed or one.latents))


def counts_of(cache) -> np.ndarray:
    """How many rows each stored row is, [B, H, N]; 0 in unused slots."""
    return np.where(np.array(cache.positions) >= 0, counts_of_slots(cache), 0)


def check_counts(course: Course) -> None:
    """Every token seen is in one row of each head, and a row is a whole number of them."""
    course.flush()
    counts = counts_of(course.cache)
    np.testing.assert_allclose(counts, np.rint(counts), rtol=1e-4)
    for total, one in zip(counts.sum(axis=2), course.references, strict=True):
        np.testing.assert_allclose(total, one.offset, rtol=1e-4)


# What is kept


def test_the_suites_know_what_folds():
    assert FOLDING == ("h2o",)
    for column, one in COLUMNS.items():
        config = H2OConfig.of(max_kv_size=64, policy="h2o", **one.settings)
        assert config.folds == (column in FOLDED)
        assert not replace(config, policy=policies.KeyDiff()).folds
        assert not replace(config, policy=policies.H2O(fold=False)).folds


@pytest.mark.parametrize("batch", [None, 2])
def test_a_long_chunk_reads_and_scores_a_row_of_n_as_n(batch):
    course = Course("dense", "h2o", batch, evict_every=4)
    course.tokens(24)
    assert np.array(course.cache.row_bias).max() > 0
    course.chunk(12)  # attended to by MLX, and scored beside that; then seen, being even
    course.tokens(2)


def test_a_policy_without_scores_folds_too(monkeypatch):
    monkeypatch.setattr(policies.KeyDiff, "folds", True)
    cache, rows = H2OKVCache(H2OConfig.of(max_kv_size=16)), mx.random.normal((1, 2, 24, 32))
    for row in mx.split(rows, 24, axis=2):
        cache.attend(row, *cache.update_and_fetch(row, row), scale=SCALE)
    assert counts_of(cache).max() > 1


@pytest.mark.parametrize("column", ["dense", "4 bits"])
def test_rows_are_dropped_where_that_is_asked_for(column):
    """As the reference drops them; a file says so, and one of a cache that folds does not."""
    course = Course(column, "h2o", evict_every=4, fold=False)
    course.chunk(31)
    course.tokens(9)
    assert course.cache.row_bias is None
    course.copied("file").chunk(3)
    assert '"fold": false' in course.cache.state[-1]
    assert "fold" not in Course(column, "h2o").cache.state[-1]
    other = Course(column, "h2o", evict_every=4)
    other.chunk(40)
    assert other.cache.size() and other.cache.row_bias is not None


@pytest.mark.slow
@pytest.mark.matrix(2)
@pytest.mark.parametrize("evict_every", [1, 4])
@pytest.mark.parametrize("column", ["dense", "8 bits", "4 bits"])
def test_no_token_is_lost(column, evict_every):
    with everything_folds():
        course = Course(column, "h2o", evict_every=evict_every)
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
        assert course.followed <= 4


@pytest.mark.slow
@pytest.mark.matrix(3)
@pytest.mark.parametrize("speculative", [0, 3])
@pytest.mark.parametrize("column", FOLDED)
def test_sinks_and_the_recent_window_are_as_they_came(column, speculative):
    course = Course(column, "h2o", evict_every=4, speculative=speculative)
    protected = 0
    for length in (20, *[1] * 30, 30, *[1] * 7):
        course.chunk(length)
        cache, config = course.cache, course.config
        positions, counts = np.array(cache.positions)[0], counts_of(cache)[0]
        sequence = course.sequences[0]
        for stored, came, bits, centres in zip(
            stored_rows(cache), sequence.came, course.bits, sequence.centres, strict=True
        ):
            for head, slot in np.ndindex(*positions.shape):
                at = positions[head, slot]
                if config.budget.sink_size <= at < cache.offset - config.recent_size:
                    continue
                protected += 1
                assert counts[head, slot] == 1
                centre = None if centres is None else centres[head]
                expected = rounded(came[head, at][None], bits, centre)[0]
                np.testing.assert_array_equal(stored[0, head, slot], expected)
    assert protected > 500


@pytest.mark.parametrize("max_kv_size", [56, 80])
def test_while_nothing_goes_no_bias_is_added(max_kv_size):
    course = Course("dense", "h2o", max_kv_size=max_kv_size, recent_size=None)
    for length in (20, 1, 5, *[1] * 30):
        course.chunk(length)
        assert course.cache.row_bias is None


# What attention is told


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 3])
def test_duplicates_are_exact(length, backend):
    """Identical rows are the nearest and cost nothing: attention is that over all tokens."""
    rng = np.random.default_rng(3)
    which = np.concatenate([np.arange(5), rng.integers(0, 5, 40)])
    keys, values = rng.standard_normal((2, 1, 2, 5, 16)).astype(np.float32)[:, :, :, which]
    queries = rng.standard_normal((1, 4, length, 16)).astype(np.float32)
    shape = (1, 2, len(which))
    beside = [mx.array(part, mx.float32) for part in (np.zeros(shape), *rng.random((2, *shape)))]
    kept = mx.broadcast_to(mx.arange(5, dtype=mx.uint32), (1, 2, 5))
    with use_backend(backend):
        found = resolve().fold(
            mx.array(keys), mx.array(values), *beside, mx.ones(shape, mx.bool_), kept
        )
        k, v, bias = (
            resolve().put_rows(whole, found.into, part)[:, :, :5]
            for whole, part in ((mx.array(keys), found.keys), (mx.array(values), found.values),
                                (beside[0], found.bias))
        )  # fmt: skip
        out = resolve().attention(mx.array(queries), k, v, row_bias=bias, scale=SCALE)[0]
    expected = reference.attention(queries, keys, values, scale=SCALE)
    np.testing.assert_allclose(np.array(out), expected.out, rtol=0, atol=2e-5)
    np.testing.assert_allclose(np.exp(bias).sum(axis=2), len(which), rtol=1e-6)


@NATIVE
def test_the_native_operation_refuses_what_it_cannot_read():
    rng = np.random.default_rng(5)
    keys, values = (mx.array(rng.random((1, 2, 9, 8)), mx.float32) for _ in range(2))
    one = mx.ones((1, 2, 9))
    kept = mx.broadcast_to(mx.arange(7, dtype=mx.uint32), (1, 2, 7))
    given = [keys, values, one, one, one, one > 0, kept]
    wrong = (
        (1, values[:, :, :8], r"values are float32 \(1, 2, 8, 8\)"),
        (1, values.astype(mx.float16), "values are float16"),
        (2, one[:, :, :8], "bias is float32"),
        (3, one.astype(mx.float16), "mass is float16"),
        (4, one[:, :1], "weights are float32"),
        (5, one, "eligible is float32"),
        (6, kept.astype(mx.int32), "kept is int32"),
        (6, mx.broadcast_to(mx.arange(9, dtype=mx.uint32), (1, 2, 9)), "K below N = 9"),
    )
    for place, other, said in wrong:
        with pytest.raises(ValueError, match=rf"^\[fold\] .*{said}"):
            get("native")._core.fold(*given[:place], other, *given[place + 1 :])
    given[1] = values.astype(mx.float16)
    for one, other in zip(get("native").fold(*given), folding.fold(*given), strict=True):
        assert one.dtype == other.dtype and mx.array_equal(one, other).item()


def test_the_mean_is_weighted_by_mass_and_by_the_length_of_the_value():
    """One of three rows goes, into the nearer of the two that stay, by hand."""
    sizes = {"max_kv_size": 4, "sink_size": 1, "recent_size": 1, "evict_every": 1}
    cache = H2OKVCache(H2OConfig.of(policy="h2o", diversity=0.0, **sizes))
    keys = np.array([[0, 4], [3, 0], [3, 0.5], [-3, 0], [0, 4]], np.float32)
    values = np.array([[1, 1], [2, 0], [0, 1], [0, 3], [1, 1]], np.float32)
    mass = np.zeros(4)
    for n, row in enumerate(zip(keys, values, strict=True)):
        k, v = cache.update_and_fetch(*(mx.array(part)[None, None, None] for part in row))
        cache.attend(k[:, :, -1:], k, v, scale=0.1)
        if n < 4:
            weights = np.exp(0.1 * keys[: n + 1] @ keys[n])
            mass[: n + 1] += weights / weights.sum()
    ranks = mass / np.sqrt(np.arange(4, 0, -1)) * np.linalg.norm(values[:4], axis=1)
    assert ranks[1:].argmin() == 1
    assert sorted(np.array(cache.positions)[0, 0].tolist()) == [0, 1, 3, 4]
    slot = int(np.argmax(np.array(cache.positions)[0, 0] == 1))
    for found, rows in ((cache.keys, keys), (cache.values, values)):
        expected = ranks[1:3] / ranks[1:3].sum() @ rows[1:3]
        np.testing.assert_allclose(np.array(found)[0, 0, slot], expected, rtol=1e-5)
    np.testing.assert_allclose(counts_of(cache)[0, 0, slot], 2, rtol=1e-6)
    last = np.exp(0.1 * np.array(cache.keys)[0, 0] @ keys[4] + np.log(counts_of(cache)[0, 0]))
    np.testing.assert_allclose(
        np.array(cache.scores)[0, 0, slot], mass[1:3].sum() + (last / last.sum())[slot], rtol=1e-5
    )


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("diversity", [0.0, 0.5, 1.0])
def test_the_share_of_diverse_rows_is_kept_whatever_their_mass(diversity, fold):
    course = Course("dense", "h2o", max_kv_size=20, sink_size=2, recent_size=4,
                    diversity=diversity, fold=fold, evict_every=1)  # fmt: skip
    course.tokens(20)
    rows = course.references[0].heads[0]
    slots = np.argsort(np.array(course.cache.positions)[0, 0])
    apart = np.array(fast.key_diversity(course.cache.keys))[0, 0, slots]
    apart = [apart[place : place + (1 if fold else 3)].max() for place in range(20)]
    middle = [row.position for row in rows if 2 <= row.position < 17]
    best = sorted(middle, key=lambda position: -apart[position])[: int(13 * diversity)]
    course.tokens(1)
    assert set(best) <= set(np.array(course.cache.positions)[0, 0].tolist())


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
        found = merged_attention(
            [AttentionRows(mx.array(k), mx.array(v), {})], mx.array(q), scale=SCALE, mask=given,
            sinks=mx.array(sinks), return_scores=False, row_bias=mx.array(bias),
        )[0]  # fmt: skip
    allowed, added = reference.masked_pairs(given, (2, 4, length, rows))
    logs = np.repeat(bias[:, :, None, :rows], 2, axis=1) + added
    both = np.where(allowed, -np.inf, logs).astype(np.float32)
    expected = reference.attention(q, k, v, scale=SCALE, mask=both, sinks=sinks)
    np.testing.assert_allclose(np.array(found), expected.out, rtol=0, atol=3e-5)


@NATIVE
@pytest.mark.parametrize("kv_bits", [None, 8])  # a code of 4 bits that falls otherwise is a lot
def test_a_model_is_the_same_on_every_back_end(kv_bits):
    """Prompts longer than a block, steps and chunks, over rows that were folded."""
    model = tiny_qwen3(head_dim=32)
    prompt, found = random_prompt(400)[:278], []
    for backend in ("composed", "native"):
        caches = make_prompt_cache(
            model, 40, policy="h2o", kv_bits=kv_bits, kv_group_size=32, recent_size=10
        )
        with routing(model), use_backend(backend):
            logits = in_parts(model, caches, prompt, 60, *[1] * 10, 200, 4)
        assert counts_of(caches[0]).max() > 4
        found.append((np.array(logits[0]), np.array(caches[1].positions)))
    (one, places), (other, others) = found
    np.testing.assert_array_equal(places, others)
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-3 * np.abs(one).max())


# What is refused, and what there is no room for


@pytest.mark.parametrize("column", ["dense", "8 bits"])
def test_a_row_that_nothing_is_eligible_for_is_dropped(column):
    """Where all but one row are protected it is a window, and the budget holds."""
    given = {"max_kv_size": 4, "sink_size": 1, "recent_size": 3, "heavy_size": 0}
    course = Course(column, "h2o", **given)
    for length in (1, 1, 3, *[1] * 6, 9, 1, 1):
        course.chunk(length)
        if length == 1:
            assert course.cache.size() <= 4
    course.flush()
    newest = course.cache.offset
    for found in np.array(course.cache.positions)[0].tolist():
        assert sorted(found) == [0, *range(newest - 3, newest)]
    assert counts_of(course.cache).sum(axis=2).max() < newest
