"""The reference against independent results: stock MLX, and examples worked out by hand."""

import math

import mlx.core as mx
import numpy as np
import pytest

import reference
from mlx_h2o.operations.arguments import AFFINE_BITS


@pytest.mark.parametrize("mask", [None, "causal", "bool", "additive"])
@pytest.mark.parametrize("sinks", [None, (0.5, -1.0, 3.0, 0.0)])
def test_attention_equals_stock_mlx(mask: str | None, sinks: tuple[float, ...] | None) -> None:
    q, k, v = (mx.random.normal((2, n, r, 64)) for n, r in ((4, 5), (2, 33), (2, 33)))
    masks = {"bool": mx.random.uniform(shape=(5, 33)) < 0.7, "additive": mx.random.normal((5, 33))}
    given = {"scale": 0.2, "mask": masks.get(mask, mask)}
    given["sinks"] = None if sinks is None else mx.array(sinks)
    stock = mx.fast.scaled_dot_product_attention(q, k, v, **given)
    assert reference.worst_error(stock, reference.attention(q, k, v, **given).out) < 2e-6


def test_attention_by_hand() -> None:
    q = np.array([[[[1.0, 0.0]]]])
    k = np.array([[[[math.log(3.0), 9.0], [0.0, 9.0]]]])
    v = np.array([[[[4.0], [8.0]]]])
    found = reference.attention(q, k, v, scale=1.0)
    np.testing.assert_allclose(found.scores[0, 0, 0], [math.log(3), 0])
    np.testing.assert_allclose(found.lse, math.log(4))
    np.testing.assert_allclose(found.out, 3 / 4 * 4 + 1 / 4 * 8)
    # A sink of log 4 takes half of the weight and has no row.
    found = reference.attention(q, k, v, scale=1.0, sinks=np.array([math.log(4.0)]))
    np.testing.assert_allclose(found.lse, math.log(8))
    np.testing.assert_allclose(found.out, 5 / 2)


def test_mask_thresholds_are_those_of_mlx() -> None:
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        name = str(dtype).removeprefix("mlx.core.")
        assert reference.MASK_THRESHOLD[name] == float(mx.finfo(dtype).min) / 2
        assert reference.ULP[name] == float(mx.finfo(dtype).eps)


def test_order_by_hand() -> None:
    scores = [1.0, np.nan, np.inf, 0.5, 0.5, -np.inf, 9.0, 9.0]
    positions = [10, 11, 12, 14, 13, 15, -1, 0]
    order = reference.retention_order(scores, positions, sink_size=1, recent_start=15)
    assert order == [7, 5, 2, 0, 4, 3, 1, 6]
    s, p = np.array([[scores]]), np.array([[positions]])
    zones = {"sink_size": 1, "recent_start": 15}
    assert reference.keep_indices(s, p, keep=3, **zones).tolist() == [[[2, 5, 7]]]


def test_accumulation_by_hand() -> None:
    seen = np.array([[[np.nan, 2.0, 5.0, np.nan]]])
    # Two query heads, two queries: [Hq, Lq, N].
    scores = [
        [[1.0, 4.0, -np.inf, -np.inf], [2.0, 1.0, -np.inf, -np.inf]],
        [[-3.0, -np.inf, -np.inf, -np.inf], [-4.0, -5.0, -np.inf, -np.inf]],
    ]
    found = reference.accumulate(seen, np.array([scores]), decay=0.5)
    # Row 0: set by |(1 - 3) / 2| = 1, then halfway to |(2 - 4) / 2| = 1.
    # Row 1: halfway from 2 to 4 (one head is masked), then halfway to |(1 - 5) / 2| = 2.
    np.testing.assert_allclose(found[0, 0], [1.0, 2.5, 5.0, np.nan])


def test_worst_error_does_not_forgive_what_is_not_a_number() -> None:
    nan, inf = np.nan, np.inf
    assert reference.worst_error([1.0, nan, -inf], [1.5, nan, -inf]) == 0.5
    for found, expected in ((nan, 1.0), (1.0, nan), (inf, 1.0), (1.0, inf), (inf, -inf)):
        assert reference.worst_error(np.array([found]), np.array([expected])) == inf
    assert reference.worst_error(np.array([1.0]), np.array([[1.0, 2.0]])) == inf
    assert reference.error_ratio(0.0, 0.0) == 0
    assert reference.error_ratio(1e-9, 0.0) == inf


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_reference_reads_the_format_of_mlx(bits: int) -> None:
    rows = mx.array(np.random.default_rng(bits).standard_normal((2, 3, 5, 96)).astype(np.float32))
    packed = mx.quantize(rows, group_size=32, bits=bits)
    expected = np.array(mx.dequantize(*packed, group_size=32, bits=bits))
    found = reference.dequantized(*packed, bits=bits, group_size=32)
    assert np.abs(found - expected).max() <= 4 * 2.0**-23 * np.abs(expected).max()
