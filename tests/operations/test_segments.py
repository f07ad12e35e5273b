"""Rows in segments on the native back end: merged attention, and the rows as arrays."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from back_ends import NATIVE
from mlx_h2o import fast
from mlx_h2o.operations.backends import get
from mlx_h2o.operations.composed import merging
from reference import float64

pytestmark = NATIVE
GROUP = 32
BOUND = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


def rows(rng, *shape, dtype=mx.float32):
    return mx.array(rng.standard_normal(shape), mx.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_native_merging_is_that_of_the_definition(dtype, length, masked):
    rng = np.random.default_rng(1)
    segments = [
        (rows(rng, 2, 2, n, 32, dtype=dtype), rows(rng, 2, 2, n, 48, dtype=dtype))
        for n in (5, 1, 9)
    ]
    queries = rows(rng, 2, 4, length, 32, dtype=dtype)
    mask = np.array(rng.random((2, 4, length, 15)) < 0.5)
    mask[0, 1] = False  # a query that sees nothing
    mask[1, 2, :, :5] = False  # one that sees nothing in the first segment
    if not masked:
        mask[...] = True
    call = partial(
        fast.scaled_dot_product_attention_with_scores, queries, scale=0.2, return_lse=True
    )
    seen = np.split(mask, [5, 6], axis=-1)
    parts = [call(*kept, mask=mx.array(part)) for kept, part in zip(segments, seen, strict=True)]
    outs, _, lses = zip(*parts, strict=True)
    found = get("native").merge_segments(outs, lses)
    expected = merging.merge_segments(outs, lses)
    joined = (mx.concatenate(side, axis=2) for side in zip(*segments, strict=True))
    whole = call(*joined, mask=mx.array(mask))
    bound = BOUND[dtype]
    np.testing.assert_allclose(float64(found[0]), float64(whole[0]), 4 * bound, 4 * bound)
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(float64(one), float64(other), bound, bound)


def test_nan_stays_in_its_query():
    rng = np.random.default_rng(2)
    outs = [rows(rng, 1, 2, 3, 32) for _ in "ab"]
    lses = [rows(rng, 1, 2, 3) for _ in "ab"]
    lses[1] = mx.where(mx.arange(3) == 1, mx.nan, lses[1])
    out, lse = get("native").merge_segments(outs, lses)
    assert np.isnan(np.array(lse)).tolist() == [[[False, True, False]] * 2]
    assert (np.isnan(np.array(out)).all(axis=-1) == np.isnan(np.array(lse))).all()


def test_views_are_merged_as_they_look():
    rng = np.random.default_rng(3)
    outs = [rows(rng, 1, 3, 2, 32).swapaxes(1, 2) for _ in "ab"]
    lses = [rows(rng, 1, 3, 2).swapaxes(1, 2) for _ in "ab"]
    found = get("native").merge_segments(outs, lses)
    plain = [[mx.contiguous(one) for one in some] for some in (outs, lses)]
    for one, other in zip(found, get("native").merge_segments(*plain), strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))


def tiers_of(rng, counts, bits, width, dtype, heads=3):
    """Packed rows of each of ``bits``, flat as the operation takes them."""
    tiers = []
    for count, each in zip(counts, bits, strict=True):
        stored = rows(rng, 2, heads, count, width, dtype=dtype)
        tiers += mx.quantize(stored, group_size=GROUP, bits=each)
    return tiers


def check_same(found, expected, dtype):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.dtype == mx.uint32:
            np.testing.assert_array_equal(np.array(one), np.array(other))
        else:
            np.testing.assert_allclose(float64(one), float64(other), BOUND[dtype], 1e-6)


@pytest.mark.parametrize("bits", [(8,), (8, 4), (6, 3), (5, 8)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_rows_as_one_array(bits, dtype):
    rng = np.random.default_rng(4)
    newest = rows(rng, 2, 3, 5, 96, dtype=dtype)
    tiers = tiers_of(rng, (7, 4)[: len(bits)], bits, 96, dtype)
    found = get("native").segment_rows(tiers, newest, bits, GROUP)
    check_same(found, merging.segment_rows(tiers, newest, bits, GROUP), dtype)
    np.testing.assert_array_equal(float64(found[0])[:, :, -5:], float64(newest))
    for rows_of in (get("native"), merging):
        first_empty = [part[:, :, :0] for part in tiers[:3]] + tiers[3:]
        others = rows_of.segment_rows(first_empty, newest, bits, GROUP)
        check_same(others, [found[0][:, :, 7:]], dtype)
    views = get("native").segment_rows([p[:, :, 1:] for p in tiers], newest[:, :, :0], bits, GROUP)
    np.testing.assert_array_equal(float64(views[0])[:, :, :3], float64(found[0])[:, :, 1:4])


@pytest.mark.parametrize("to", [0, 2, 4, 8])
@pytest.mark.parametrize("bits", [(8, 4), (4, 2), (8,), ()])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_some_rows_in_one_form(to, bits, dtype):
    """A row keeps the upper bits of its codes, and one that had fewer keeps its numbers."""
    rng = np.random.default_rng(5)
    newest = rows(rng, 2, 3, 5, 64, dtype=dtype)
    tiers = tiers_of(rng, (7, 4)[: len(bits)], bits, 64, dtype)
    total = 5 + sum((7, 4)[: len(bits)])
    order = np.stack([rng.permutation(total)[:4] for _ in range(6)]).reshape(2, 3, 4)
    slots = mx.array(order.astype(np.uint32))
    found = get("native").segment_rows(tiers, newest, bits, GROUP, slots, to)
    check_same(found, merging.segment_rows(tiers, newest, bits, GROUP, slots, to), dtype)
    if to:  # more bits change no number
        again = get("native").segment_rows(found, newest[:, :, :0], [to], GROUP, None, 8)
        unpacked = [
            mx.dequantize(*parts, group_size=GROUP, bits=width)
            for parts, width in ((found, to), (again, 8))
        ]
        np.testing.assert_array_equal(*map(float64, unpacked))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda outs, lses: (outs[:1], lses), "found 1 outputs and 2 lse"),
        (lambda outs, lses: (outs, lses[::-1]), "lse are"),
        (lambda outs, lses: ([outs[0].astype(mx.int32)] * 2, lses), "outputs are"),
        (lambda outs, lses: ([], []), "at least one"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, text):
    rng = np.random.default_rng(5)
    parts = [rows(rng, 1, 2, 3, 32)] * 2, [rows(rng, 1, 2, 3), rows(rng, 1, 2, 4)]
    if "lse are" not in text:
        parts = parts[0], [parts[1][0]] * 2
    with pytest.raises(ValueError, match=rf"^\[merge_segments\] .*{text}"):
        get("native").merge_segments(*change(*parts))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"bits": [4]}, "words are uint32"),
        ({"bits": [7]}, "rows of 64 elements have 7 bits"),
        ({"bits": [8, 8]}, "found 3 arrays and 2 bits"),
        ({"newest": mx.zeros((2, 3, 5, 64), mx.int32)}, "the newest rows are int32"),
        ({"newest": mx.zeros((2, 2, 5, 64))}, "words are uint32"),
        ({"to": 6}, "rows are asked for in 6 bits"),
        ({"slots": mx.zeros((2, 2, 1), mx.uint32)}, "slots are uint32"),
        ({"slots": mx.zeros((2, 3, 1), mx.int32)}, "slots are int32"),
        ({"tiers": [], "bits": [], "newest": mx.zeros((2, 3, 0, 64)),
          "slots": mx.zeros((2, 3, 1), mx.uint32)}, "there are no rows"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(given, text):
    rng = np.random.default_rng(4)
    call = {"tiers": tiers_of(rng, (7,), (8,), 64, mx.float32), "bits": [8],
            "newest": rows(rng, 2, 3, 5, 64), "group_size": GROUP}  # fmt: skip
    with pytest.raises(ValueError, match=rf"^\[segment_rows\] .*{text}"):
        get("native").segment_rows(**call | given)


def test_slots_beyond_the_rows_are_the_last_row():
    newest = mx.arange(10.0).reshape(1, 1, 5, 2)
    found = get("native").segment_rows([], newest, [], GROUP, mx.array([[[4, 9]]], mx.uint32))
    assert found[0].tolist() == [[[[8.0, 9.0], [8.0, 9.0]]]]
