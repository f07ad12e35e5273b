"""Operations on the rows of a cache: each CPU back end against the reference."""

import mlx.core as mx
import numpy as np
import pytest

import reference
from back_ends import BACKENDS, NATIVE
from cache_checks import address
from mlx_h2o import fast, use_backend

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def importance_and_scores(rng, heads, group, queries, rows, *, masked=0.3):
    before = rng.random((2, heads, rows)).astype(np.float32)
    before[rng.random(before.shape) < 0.4] = np.nan
    scores = (rng.standard_normal((2, heads * group, queries, rows)) * 4).astype(np.float32)
    hidden = rng.random(scores.shape)
    scores[hidden < masked] = -np.inf
    scores[hidden < masked / 4] = np.nan
    return before, scores


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("masked", [0.0, 0.4])
@NATIVE
def test_one_query_gives_the_same_bits_on_every_cpu_back_end(decay, masked):
    before, scores = importance_and_scores(np.random.default_rng(7), 2, 4, 1, 1000, masked=masked)
    found = []
    for name in BACKENDS:
        with use_backend(name):
            result = fast.accumulate_scores(mx.array(before), mx.array(scores), decay=decay)
            found.append(np.array(result).view(np.uint32))
    scored = ~np.isnan(found[0].view(np.float32))
    assert scored.sum() > 1000
    np.testing.assert_array_equal(found[0][scored], found[1][scored])
    np.testing.assert_array_equal(np.isnan(found[1].view(np.float32)), ~scored)


def test_accumulate_scores_reads_any_strides(backend):
    before, scores = importance_and_scores(np.random.default_rng(9), 2, 2, 5, 20)
    turned = mx.array(np.moveaxis(scores, 3, 1)).transpose(0, 2, 3, 1)
    wide = mx.array(np.repeat(before, 2, axis=2))[:, :, ::2]
    found = fast.accumulate_scores(wide, turned, decay=0.9)
    expected = reference.accumulate(before, scores, decay=0.9)
    np.testing.assert_allclose(np.array(found), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (31, 8), (33, 65), (300, 64)])
def test_key_diversity_equals_the_reference(backend, dtype, rows, width):
    rng = np.random.default_rng(rows)
    keys = mx.array(rng.standard_normal((2, 3, rows, width)) + 0.3).astype(dtype)
    for view in (keys, keys[:, :, -6:], keys[..., ::2], keys.transpose(0, 1, 3, 2)):
        found = fast.key_diversity(view)
        assert found.dtype == mx.float32
        np.testing.assert_allclose(np.array(found), reference.key_diversity(view), atol=2e-6)


def test_a_key_of_zeros_ranks_in_the_middle(backend):
    keys = mx.array([[[[1.0, 0.0], [0.0, 0.0], [1.0, 0.1]]]])
    found = np.array(fast.key_diversity(keys))[0, 0]
    assert found[1] == 0
    assert max(found[0], found[2]) < -0.9
    assert not np.any(np.array(fast.key_diversity(mx.zeros((1, 1, 3, 2)))))


@NATIVE
def test_importance_is_updated_in_place():
    with use_backend("native"):
        q, k = mx.ones((1, 2, 1, 8)), mx.ones((1, 1, 300, 8))
        importance = mx.ones((1, 1, 300)) + 0
        before = address(importance)
        for _ in range(3):
            _, importance = fast.attention_and_accumulate(q, k, k, importance, scale=1.0, decay=0.5)
            assert address(importance) == before
            importance = fast.accumulate_scores(importance, mx.ones((1, 2, 1, 300)), decay=0.5)
            assert address(importance) == before
