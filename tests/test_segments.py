"""Rows in segments on the native back end: merged attention, and the rows as arrays."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import fast
from mlx_h2o.operations import composed, composed_segments, native
from mlx_h2o.operations.requests import QuantizedRows

pytestmark = pytest.mark.skipif(
    bool(native.unavailable_reason()), reason="no native back end: nothing to compare"
)
GROUP = 32
WIDTHS = {"one": [(8, 8)], "two": [(8, 4), (4, 2)], "odd": [(6, 3), (5, 8)]}
BOUND = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


def rows_as_arrays(tiers, keys, values, bits, v_bits, group_size):
    from mlx_h2o import _core

    return _core.rows_as_arrays(
        tiers, keys, values, bits=bits, value_bits=v_bits, group_size=group_size
    )


def dequantised(tiers, keys, values, bits, v_bits, group_size):
    """The definition: those of all tiers, dequantised in float32 and rounded, then the dense."""
    sides = []
    for side, (newest, widths) in enumerate(((keys, bits), (values, v_bits))):
        parts = [
            composed.dense(QuantizedRows(*tiers[at : at + 3], width, group_size))
            for at, width in zip(range(3 * side, len(tiers), 6), widths, strict=True)
        ]
        parts = [part.astype(newest.dtype) for part in parts]
        sides.append(mx.concatenate([*parts, newest], axis=2))
    return sides


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
    parts, start = [], 0
    for keys, values in segments:
        part = mx.array(mask[..., start : start + keys.shape[2]])
        start += keys.shape[2]
        parts.append(
            fast.scaled_dot_product_attention_with_scores(
                queries, keys, values, scale=0.2, mask=part, return_lse=True
            )
        )
    outs, scores, lses = zip(*parts, strict=True)
    found = native.merge_segments(outs, lses, scores)
    expected = composed_segments.merge_segments(outs, lses, scores)
    whole = fast.scaled_dot_product_attention_with_scores(
        queries, *(mx.concatenate(side, axis=2) for side in zip(*segments, strict=True)),
        scale=0.2, mask=mx.array(mask), return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(
        np.array(found[0].astype(mx.float32)), np.array(whole[0].astype(mx.float32)),
        rtol=4 * BOUND[dtype], atol=4 * BOUND[dtype],
    )  # fmt: skip
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.array(one.astype(mx.float32)), np.array(other.astype(mx.float32)),
            rtol=BOUND[dtype], atol=BOUND[dtype],
        )  # fmt: skip


def test_nan_stays_in_its_query():
    rng = np.random.default_rng(2)
    outs = [rows(rng, 1, 2, 3, 32) for _ in "ab"]
    lses = [rows(rng, 1, 2, 3) for _ in "ab"]
    lses[1] = mx.where(mx.arange(3) == 1, mx.nan, lses[1])
    scores = [rows(rng, 1, 2, 3, n) for n in (4, 2)]
    out, lse, joined = native.merge_segments(outs, lses, scores)
    assert np.isnan(np.array(lse)).tolist() == [[[False, True, False]] * 2]
    assert (np.isnan(np.array(out)).all(axis=-1) == np.isnan(np.array(lse))).all()
    np.testing.assert_array_equal(np.array(joined), np.concatenate(scores, axis=-1))


def test_views_are_merged_as_they_look():
    rng = np.random.default_rng(3)
    outs = [rows(rng, 1, 3, 2, 32).swapaxes(1, 2) for _ in "ab"]
    lses = [rows(rng, 1, 3, 2).swapaxes(1, 2) for _ in "ab"]
    scores = [rows(rng, 1, 3, 2, n).swapaxes(1, 2) for n in (4, 2)]
    found = native.merge_segments(outs, lses, scores)
    plain = [[mx.contiguous(one) for one in some] for some in (outs, lses, scores)]
    for one, other in zip(found, native.merge_segments(*plain), strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))


@pytest.mark.parametrize("kind", sorted(WIDTHS))
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_rows_as_arrays_are_the_dequantised_and_the_newest(kind, dtype):
    rng = np.random.default_rng(4)
    newest = rows(rng, 2, 3, 5, 64, dtype=dtype), rows(rng, 2, 3, 5, 96, dtype=dtype)
    tiers = []
    for count, bits in zip((7, 4), WIDTHS[kind], strict=False):
        for width, each in zip((64, 96), bits, strict=True):
            stored = rows(rng, 2, 3, count, width, dtype=dtype)
            tiers += mx.quantize(stored, group_size=GROUP, bits=each)
    packing = ([each[0] for each in WIDTHS[kind]], [each[1] for each in WIDTHS[kind]], GROUP)
    found = rows_as_arrays(tiers, *newest, *packing)
    expected = dequantised(tiers, *newest, *packing)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == dtype
        np.testing.assert_allclose(
            np.array(one.astype(mx.float32)), np.array(other.astype(mx.float32)),
            rtol=BOUND[dtype], atol=1e-6,
        )  # fmt: skip
    cut = [part[:, :, 1:] for part in tiers]
    views = rows_as_arrays(cut, *(side[:, :, :0] for side in newest), *packing)
    start = tiers[0].shape[2]
    np.testing.assert_array_equal(
        np.array(views[0].astype(mx.float32))[:, :, : start - 1],
        np.array(found[0].astype(mx.float32))[:, :, 1:start],
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda outs, lses, scores: (outs[:1], lses, scores), "found 1 outputs, 2 lse"),
        (lambda outs, lses, scores: (outs, lses[::-1], scores), "lse are"),
        (lambda outs, lses, scores: (outs, lses, [scores[0], scores[1][:, :1]]), "scores are"),
        (lambda outs, lses, scores: ([outs[0].astype(mx.int32)] * 2, lses, scores), "outputs are"),
        (lambda outs, lses, scores: ([], [], []), "at least one"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, text):
    rng = np.random.default_rng(5)
    parts = ([rows(rng, 1, 2, 3, 32)] * 2, [rows(rng, 1, 2, 3), rows(rng, 1, 2, 4)],
             [rows(rng, 1, 2, 3, 4)] * 2)  # fmt: skip
    if "lse are" not in text:
        parts = (parts[0], [parts[1][0]] * 2, parts[2])
    with pytest.raises(ValueError, match=rf"^\[merge_segments\] .*{text}"):
        native.merge_segments(*change(*parts))


def test_rows_that_do_not_fit_are_refused():
    rng = np.random.default_rng(4)
    newest = rows(rng, 1, 2, 5, 64), rows(rng, 1, 2, 5, 64)
    tier = [part for side in newest for part in mx.quantize(side, group_size=GROUP, bits=8)]
    with pytest.raises(ValueError, match=r"^\[rows_as_arrays\] words are uint32"):
        rows_as_arrays(tier, *newest, [4], [8], GROUP)
    with pytest.raises(ValueError, match=r"^\[rows_as_arrays\] .* expected the same \[B, H, N\]"):
        rows_as_arrays(tier, newest[0][:, :, 1:], newest[1], [8], [8], GROUP)
    with pytest.raises(ValueError, match=r"^\[rows_as_arrays\] rows of 64 elements have 7 bits"):
        rows_as_arrays(tier, *newest, [7], [8], GROUP)
    whole, _ = rows_as_arrays(tier, *newest, [8], [8], GROUP)
    assert fast.key_diversity(whole).shape[2] == 10
