"""Attention over packed keys and values: its definition, its errors, and who serves it."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
import reference
from mlx_h2o.operations.arguments import BITS

operation = mlx_h2o.fast.scaled_dot_product_attention_quantized_with_scores


@pytest.mark.parametrize("bits", BITS)
def test_reference_reads_the_format_of_mlx(bits: int) -> None:
    rows = mx.array(np.random.default_rng(bits).standard_normal((2, 3, 5, 96)).astype(np.float32))
    packed = mx.quantize(rows, group_size=32, bits=bits)
    expected = np.array(mx.dequantize(*packed, group_size=32, bits=bits))
    found = reference.dequantized(*packed, bits=bits, group_size=32)
    assert np.abs(found - expected).max() <= 4 * 2.0**-23 * np.abs(expected).max()


def packed(heads: int = 2, rows: int = 10, size: int = 64, bits: int = 8, group: int = 64) -> list:
    array = mx.array(np.random.default_rng(0).standard_normal((1, heads, rows, size)), mx.float32)
    return list(mx.quantize(array, group_size=group, bits=bits))


QUERIES = mx.ones((1, 4, 1, 64))


def test_skipped_counts_the_rows_that_add_nothing() -> None:
    """One row takes almost all the weight; a sink and masked pairs change what is skipped."""
    keys = mx.zeros((1, 2, 10, 64)).at[:, :, 3].add(20 / 64)
    rows = tuple(mx.quantize(keys, group_size=64, bits=8))
    options = {"scale": 1.0, "sparse_v_threshold": 1e-6, "return_skipped": True}
    *_, skipped = operation(QUERIES, *rows, *packed(), **options)
    assert skipped.dtype == mx.float32 and skipped.shape == (1, 4, 1)
    assert mx.allclose(skipped, mx.array(0.9), atol=1e-6)
    *_, skipped = operation(QUERIES, *rows, *packed(), mask=mx.arange(10) < 5, **options)
    assert mx.allclose(skipped, mx.array(0.4), atol=1e-6)
    *_, skipped = operation(QUERIES, *rows, *packed(), mask=mx.zeros(10, mx.bool_), **options)
    assert mx.all(skipped == 0)
    *_, skipped = operation(QUERIES, *rows, *packed(), sinks=mx.full((4,), 40.0), **options)
    assert mx.allclose(skipped, mx.array(1.0))
    mask = mx.zeros(10).at[3].add(math.nan)
    *_, skipped = operation(QUERIES, *rows, *packed(), mask=mask, **options)
    assert mx.all(skipped == 0)
    options["sparse_v_threshold"] = 0.0
    *_, skipped = operation(QUERIES, *rows, *packed(), **options)
    assert mx.all(skipped == 0)


@pytest.mark.parametrize("return_skipped", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_results_are_what_was_asked_for(return_lse: bool, return_skipped: bool) -> None:
    found = operation(
        QUERIES, *packed(), *packed(), scale=0.1,
        return_lse=return_lse, return_skipped=return_skipped,
    )  # fmt: skip
    small = [(1, 4, 1)] * (return_lse + return_skipped)
    assert [array.shape for array in found] == [(1, 4, 1, 64), (1, 4, 1, 10), *small]
    if return_lse and return_skipped:
        assert mx.all(found[2] > 0) and mx.all(found[3] == 0)
