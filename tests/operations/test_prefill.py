"""fast.prefill_scores against the float64 loops of the reference, and its memory."""

import math
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

import reference
from mlx_h2o import H2OKVCache, fast
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.composed import prefill
from mlx_h2o.operations.requests import attention_request

KINDS = ("ema", "mass")
SCALE = 0.25
MASKS = ("", "causal", "bool", "add", "row")
SHAPES = (((4, 2), 1, 5, 32), ((4, 2), 9, 33, 72), ((16, 1), 12, 7, 33), ((3, 3), 70, 130, 5))


def arrays(seed: int, heads=(4, 2), length=9, keys=33, size=32, dtype=mx.float32):
    rng = np.random.default_rng(seed)
    shapes = (2, heads[0], length, size), (2, heads[1], keys, size)
    return tuple(mx.array(rng.standard_normal(s).astype(np.float32)).astype(dtype) for s in shapes)


def mask_of(kind: str, q: mx.array, k: mx.array):
    """A mask of each shape; "bool" and "add" hide some queries, and one key from all."""
    rng = np.random.default_rng(3)
    shape = (*q.shape[:3], k.shape[2])
    seen = rng.random(shape) < 0.7
    seen[0, :, 0] = False
    seen[..., 4:5] = False  # if there are that many
    if kind == "bool":
        return mx.array(seen)
    if kind == "add":
        bias = np.where(seen, rng.standard_normal(shape), -math.inf)
        return mx.array(bias.astype(np.float32)).astype(mx.float16)
    if kind == "row":
        return mx.array(seen[1, 0, 0])
    return kind or None


def before_of(k: mx.array) -> mx.array:
    rng = np.random.default_rng(4)
    before = rng.random(k.shape[:3]).astype(np.float32)
    before[rng.random(before.shape) < 0.4] = np.nan
    return mx.array(before)


def expected_of(kind: str, q, k, mask, *, importance=None, sinks=None, decay=0.95, queries=128):
    result = reference.attention(q, k, k, scale=SCALE, mask=mask, sinks=sinks)
    if kind == "mass":
        return reference.attention_mass(result.scores, result.lse, k.shape[1])
    before = np.full(k.shape[:3], np.nan) if importance is None else importance
    return reference.accumulate(before, result.scores, decay=decay, queries=queries)


pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture(params=[None, 600, 1], ids=["one block", "some blocks", "blocks of one"])
def _block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(prefill, "BLOCK_BYTES", request.param)


@pytest.mark.matrix(12)
@pytest.mark.usefixtures("_block_bytes")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_reference(kind: str, mask: str) -> None:
    for heads, length, keys, size in SHAPES:
        q, k = arrays(1, heads, length, keys, size)
        given = mask_of(mask, q, k)
        found = fast.prefill_scores(q, k, scale=SCALE, mask=given, kind=kind)
        assert found.dtype == mx.float32
        expected = expected_of(kind, q, k, given)
        np.testing.assert_allclose(np.array(found), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.matrix(10)
@pytest.mark.usefixtures("_block_bytes")
@pytest.mark.parametrize("mask", MASKS)
def test_the_average_goes_on_and_takes_the_last_queries(mask: str) -> None:
    q, k = arrays(2, heads=(6, 2), length=11)
    given, before = mask_of(mask, q, k), before_of(k)
    for queries in (1, 4, 11, 128):
        found = fast.prefill_scores(
            q, k, scale=SCALE, mask=given, importance=before, decay=0.7, queries=queries
        )
        expected = expected_of("ema", q, k, given, importance=before, decay=0.7, queries=queries)
        np.testing.assert_allclose(np.array(found), expected, rtol=2e-5, atol=2e-6)


def test_large_logits_overflow_nothing() -> None:
    q, k = arrays(9)
    found = np.array(fast.prefill_scores(1e4 * q, k, scale=1.0, kind="mass"))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(axis=-1), 2 * 9, rtol=1e-5)


def test_nan_in_a_mask() -> None:
    """The average takes it for masked; the mass of its KV head is lost, that of no other."""
    q, k = arrays(10)
    bias = np.zeros((2, 4, 9, 33), np.float32)
    bias[1, 2, 3, 5] = np.nan
    masked = np.where(np.isnan(bias), np.float32(-np.inf), bias)
    call = partial(fast.prefill_scores, q, k, scale=SCALE)
    found, same = (partial(call, mask=mx.array(mask)) for mask in (bias, masked))
    assert mx.array_equal(found(), same())
    mass = np.isnan(np.array(found(kind="mass")))
    assert mass.all(-1).tolist() == [[False, False], [False, True]]
    assert mass.any(-1).sum() == 1


def test_any_strides() -> None:
    q, k = arrays(11, size=64, keys=40)
    apart = q[..., ::2], k[:, :, 3:36, ::2]
    dense = tuple(mx.contiguous(a) for a in apart)
    for kind in KINDS:
        one, other = (fast.prefill_scores(*a, scale=SCALE, kind=kind) for a in (apart, dense))
        assert mx.allclose(one, other, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", KINDS)
def test_memory_stays_below_one_matrix_of_queries_by_keys(kind: str) -> None:
    """The memory of one head: all heads together would take eight times as much."""
    queries, keys = (4096, 2048) if kind == "mass" else (128, 65536)
    q, k = mx.random.normal((1, 8, queries, 32)), mx.random.normal((1, 2, keys, 32))
    mx.eval(q, k)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(fast.prefill_scores(q, k, scale=SCALE, mask="causal", kind=kind))
    assert mx.get_peak_memory() - before < queries * keys * 4


@pytest.mark.parametrize("mask", MASKS)
def test_some_queries_are_the_last_or_stand_for_all(mask: str) -> None:
    q, k = arrays(13, length=11)
    given = {"scale": SCALE, "mask": mask_of(mask, q, k)}
    every = reference.attention(q, k, k, **given)
    last = prefill.last_scores(q, k, queries=4, **given)
    np.testing.assert_allclose(np.array(last), every.scores[:, :, -4:], rtol=1e-5, atol=1e-6)
    some, times = prefill.sampled(attention_request(q, k, k, **given), 3)
    expected = reference.attention_mass(every.scores[:, :, 1::3], every.lse[:, :, 1::3], 2)
    found = times * resolve().prefill_scores(some, None, None)
    np.testing.assert_allclose(np.array(found), 11 / 4 * expected, rtol=2e-5, atol=2e-6)


def test_a_chunk_is_scored_after_its_rows_are_stored() -> None:
    q, k = arrays(15)
    with pytest.raises(ValueError, match="there are no rows to score"):
        H2OKVCache().attend(q, k, k, scale=SCALE)
    cache = H2OKVCache()
    cache.update_and_fetch(k, k)
    with pytest.raises(ValueError, match="expected .* as the stored rows"):
        cache.attend(q, k[:, :, :7], k, scale=SCALE)
