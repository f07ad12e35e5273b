"""Attention over packed keys and values: its definition, its errors, and who serves it."""

from __future__ import annotations

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
