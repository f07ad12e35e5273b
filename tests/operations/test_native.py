"""The native back end against the float64 reference: sizes, strides, masks, NaN, selection.

`test_native_simd.py` runs this file again on every lower SIMD target. The rest of the kernels'
inner variety (every size with every mask on memory of exact size) is in tests/native/.
"""

import math

import mlx.core as mx
import numpy as np
import pytest

import reference
from back_ends import NATIVE
from mlx_h2o import fast, use_backend

pytestmark = NATIVE

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
WIDTHS = ((8, 8), (17, 80), (80, 17), (64, 64), (128, 128), (576, 512), (33, 1))
LENGTHS = (1, 31, 32, 33, 64, 65, 1023, 1024, 1025)


@pytest.fixture(autouse=True)
def _native():
    with use_backend("native"):
        yield


def random(shape, dtype=mx.float32, seed=0):
    key = mx.random.key(seed + sum(n * 31**i for i, n in enumerate(shape)) % 2**31)
    return mx.random.normal(shape, key=key).astype(dtype)


def inputs(batch=1, heads=2, kv_heads=1, queries=1, rows=33, width=32, value_width=32, dtype=None):
    dtype = dtype or mx.float32
    return (
        random((batch, heads, queries, width), dtype, 1),
        random((batch, kv_heads, rows, width), dtype, 2),
        random((batch, kv_heads, rows, value_width), dtype, 3),
    )


def check(q, k, v, *, mask=None, sinks=None, row_bias=None, scale=None):
    """Run and compare all three outputs; returns them as NumPy arrays."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = {"scale": scale, "mask": mask, "sinks": sinks, "row_bias": row_bias}
    found = fast.scaled_dot_product_attention_with_scores(q, k, v, **options, return_lse=True)
    assert [a.dtype for a in found] == [q.dtype, mx.float32, mx.float32]
    expected = reference.attention(q, k, v, **options)
    allowed = reference.tolerances(q, k, v, **options, expected=expected)
    for name, one, other, limit in zip(expected._fields, found, expected, allowed, strict=True):
        error = reference.worst_error(one, other)
        assert error <= limit, f"{name}: error {error}, allowed {limit}"
    return [reference.float64(a) for a in found]


@pytest.mark.matrix(63)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize(("width", "value_width"), WIDTHS)
def test_sizes(rows, width, value_width, dtype):
    check(*inputs(rows=rows, width=width, value_width=value_width, dtype=dtype, queries=2))


@pytest.mark.parametrize("queries", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_groups_and_queries(group, queries):
    check(*inputs(batch=2, heads=2 * group, kv_heads=2, queries=queries, rows=70), mask="causal")


def test_more_rows_than_one_tile_of_the_workspace():
    check(*inputs(heads=8, kv_heads=1, queries=70, rows=75), mask="causal")


@pytest.mark.parametrize("queries", [3, 40])
def test_causal_with_more_queries_than_keys(queries):
    out, scores, lse = check(*inputs(queries=queries, rows=2), mask="causal")
    hidden = queries - 2
    assert np.all(out[:, :, :hidden] == 0)
    assert np.all(scores[:, :, :hidden] == -math.inf)
    assert np.all(lse[:, :, :hidden] == -math.inf)


MASK_SHAPES = ((2, 4, 3, 45), (2, 1, 3, 45), (1, 4, 1, 45), (3, 45), (45,), (2, 4, 3, 1), ())


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [mx.bool_, *DTYPES], ids=str)
def test_masks_broadcast(dtype, shape):
    mask = random(shape, seed=5)
    if dtype == mx.bool_:
        mask = mask > -0.5
    else:
        lowest = mx.array(mx.finfo(dtype).min, mx.float32)
        mask = mx.where(mask > 1, lowest, mx.where(mask < -1, -math.inf, mask)).astype(dtype)
    check(*inputs(batch=2, heads=4, kv_heads=2, queries=3, rows=45), mask=mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_of_the_lowest_value_masks_and_the_next_greater_does_not(dtype):
    q, k, v = inputs(rows=4, dtype=dtype)
    half = float(mx.finfo(dtype).min) / 2
    above = half * (1 - reference.ULP[reference.dtype_name(q)])
    mask = mx.array([half, above, half * 2, 0.0], mx.float32).astype(dtype)
    _, scores, _ = check(q, k, v, mask=mask)
    assert np.array_equal(scores[0, 0, 0] == -math.inf, [True, False, True, False])


def test_a_mask_made_by_a_slice_is_read_through_its_strides():
    mask = (random((6, 90), seed=4) > 0)[::2, 1::2]
    check(*inputs(queries=3, rows=45), mask=mask)


@pytest.mark.parametrize("view", ["slice", "every second", "one for all heads", "transposed"])
def test_a_row_bias_is_read_through_its_strides(view):
    wide = random((2, 2, 96), seed=3)
    wide = mx.where(wide > 1, -math.inf, wide)
    bias = {
        "slice": wide[:, :, 7:52],
        "every second": wide[:, :, 1:91:2],
        "one for all heads": mx.broadcast_to(wide[:1, :1, :45], (2, 2, 45)),
        "transposed": random((45, 2, 2), seed=4).T,
    }[view]
    check(*inputs(batch=2, heads=4, kv_heads=2, queries=3, rows=45), mask="causal", row_bias=bias)


@pytest.mark.parametrize("sinks", [None, [0.5, -math.inf]], ids=["no sinks", "sinks"])
def test_a_query_that_sees_nothing_gives_zeros(sinks):
    q, k, v = inputs(queries=2, rows=40)
    mask = mx.broadcast_to(mx.array([[False], [True]]), (2, 40))
    out, _, lse = check(q, k, v, mask=mask, sinks=None if sinks is None else mx.array(sinks))
    assert np.all(out[:, :, 0] == 0)
    assert np.all(out[:, :, 1] != 0)
    expected = [-math.inf, -math.inf] if sinks is None else sinks
    assert np.array_equal(lse[0, :, 0], expected)


@pytest.mark.parametrize("others", [0.0, -math.inf])
@pytest.mark.parametrize("where", [0, 20, 44])
def test_nan_in_a_mask_reaches_its_query_alone(where, others):
    q, k, v = inputs(batch=2, heads=4, kv_heads=2, queries=3, rows=45)
    mask = np.full((2, 4, 3, 45), others, np.float32)
    mask[1, 2, 1, where] = math.nan
    out, scores, lse = check(q, k, v, mask=mx.array(mask))
    assert np.isnan(out[1, 2, 1]).all()
    assert np.isnan(out).sum() == out.shape[-1]
    assert np.isnan(scores).sum() == np.isnan(lse).sum() == 1


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_masked_rows_may_hold_anything(heads):
    q, k, v = inputs(heads=heads, queries=2, rows=50)
    allowed = np.arange(50) % 3 != 1
    poison = mx.where(mx.array(allowed)[None, None, :, None], 0, math.nan)
    clean = check(q, k, v, mask=mx.array(allowed))
    found = fast.scaled_dot_product_attention_with_scores(
        q, k + poison, v + poison, scale=32**-0.5, mask=mx.array(allowed), return_lse=True
    )
    for one, other in zip(found, clean, strict=True):
        assert np.array_equal(reference.float64(one), other)


def test_keys_hidden_by_causality_may_hold_anything():
    q, k, v = inputs(heads=3, queries=5, rows=5)
    poison = mx.array([0.0] * 4 + [math.nan])[None, None, :, None]
    out, _ = fast.scaled_dot_product_attention_with_scores(
        q, k + poison, v + poison, scale=0.25, mask="causal"
    )
    assert np.array_equal(
        np.isnan(np.array(out)).all(axis=-1), np.arange(5) == np.full((1, 3, 5), 4)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [17, 80])
def test_slices_of_a_cache_are_read_in_place_and_nothing_beside_them(dtype, width):
    q, k, v = inputs(batch=2, heads=6, kv_heads=3, queries=2, rows=45, width=width, dtype=dtype)
    padding = [(0, 0), (0, 0), (3, 8), (2, 5)]
    poisoned = [mx.pad(a, padding, constant_values=math.nan) for a in (k, v)]
    check(q, *(a[:, :, 3:48, 2:-5] for a in poisoned))


@pytest.mark.parametrize(
    "view",
    [
        lambda a: mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2),
        lambda a: mx.contiguous(a.swapaxes(-1, -2)).swapaxes(-1, -2),
        lambda a: mx.repeat(a, 2, axis=2)[:, :, ::2],
        lambda a: mx.repeat(a, 2, axis=3)[..., ::2],
        lambda a: mx.contiguous(a[:, :, ::-1])[:, :, ::-1],
        lambda a: mx.contiguous(a[..., ::-1])[..., ::-1],
        lambda a: mx.broadcast_to(a[:1], a.shape),
        lambda a: mx.broadcast_to(a[..., :1], a.shape),
    ],
    ids=["heads", "transposed", "rows", "columns", "rows back", "columns back", "batch", "width"],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_views_with_any_strides(view, dtype):
    q, k, v = inputs(batch=2, heads=4, kv_heads=2, queries=3, rows=45, dtype=dtype)
    check(view(q), view(k), view(v), mask="causal")


def test_keys_and_values_may_be_one_array():
    q, k, _ = inputs(heads=16, rows=70, width=512, value_width=512)
    check(q, k, k)


def test_large_logits_neither_overflow_nor_lose_the_maximum():
    q, k, v = inputs(rows=100)
    check(q * 1000, k, v, scale=1.0)


def test_long_rows_stay_accurate():
    check(*inputs(heads=1, rows=40_000, width=8, value_width=8), scale=0.0)
