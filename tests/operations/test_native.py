"""The native back end against the float64 reference: sizes, strides, masks, NaN, selection.

`test_native_simd.py` runs this file again on every lower SIMD target. tests/native/ covers the
rest of the kernels' variants: every size with every mask, on memory of exact size.
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


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_masked_rows_may_hold_anything(heads):
    q, k, v = inputs(heads=heads, queries=2, rows=50)
    allowed = np.arange(50) % 3 != 1
    poison = mx.where(mx.array(allowed)[None, None, :, None], 0, math.nan)
    clean = check(q, k, v, mask=mx.array(allowed))
    found = fast.scaled_dot_product_attention_with_scores(
        q, k + poison, v + poison, scale=32**-0.5, mask=mx.array(allowed), return_lse=True
    )
    assert all(map(np.array_equal, map(reference.float64, found), clean))


def test_keys_hidden_by_causality_may_hold_anything():
    q, k, v = inputs(heads=3, queries=5, rows=5)
    poison = mx.array([0.0] * 4 + [math.nan])[None, None, :, None]
    out, _ = fast.scaled_dot_product_attention_with_scores(
        q, k + poison, v + poison, scale=0.25, mask="causal"
    )
    assert np.isnan(np.array(out)).all(axis=-1).tolist() == [[[False] * 4 + [True]] * 3]


@pytest.mark.parametrize("view", [
    lambda a: mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2),
    lambda a: mx.contiguous(a.swapaxes(-1, -2)).swapaxes(-1, -2),
    lambda a: mx.repeat(a, 2, axis=2)[:, :, ::2], lambda a: mx.repeat(a, 2, axis=3)[..., ::2],
    lambda a: mx.contiguous(a[:, :, ::-1])[:, :, ::-1],
    lambda a: mx.contiguous(a[..., ::-1])[..., ::-1], lambda a: mx.broadcast_to(a[:1], a.shape),
    lambda a: mx.broadcast_to(a[..., :1], a.shape),
], ids=["heads", "transposed", "rows", "columns", "rows back", "columns back", "batch", "width"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_views_with_any_strides(view, dtype):
    q, k, v = inputs(batch=2, heads=32, kv_heads=16, queries=3, rows=45, dtype=dtype)
    check(view(q), view(k), view(v), mask="causal")


def test_keys_and_values_may_be_one_array():
    q, k, _ = inputs(heads=16, rows=70, width=512, value_width=512)
    check(q, k, k)


def test_large_logits_neither_overflow_nor_lose_the_maximum():
    q, k, v = inputs(rows=100)
    check(q * 1000, k, v, scale=1.0)


def test_long_rows_stay_accurate():
    check(*inputs(heads=1, rows=40_000, width=8, value_width=8), scale=0.0)


def test_a_workspace_beyond_all_memory_is_refused():
    """And beyond 2^31 floats, which its size was once cut to."""
    q = mx.broadcast_to(mx.ones(1), (1, 4096, 128, 1))
    rows = mx.broadcast_to(mx.ones(1), (1, 1, 2**27, 1))
    found = fast.attention_and_accumulate(q, rows, rows, rows[..., 0], scale=1.0, kind="mass")
    with pytest.raises(RuntimeError, match="no memory for an array of 28"):
        mx.eval(found)
