"""Attention over packed keys and values: its definition, its errors, and who serves it."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
import reference
from emulator.cases import Case
from mlx_h2o.operations import composed
from mlx_h2o.operations.arguments import BITS
from mlx_h2o.operations.backends import register
from mlx_h2o.operations.requests import AttentionRequest

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


def test_sparse_v_drops_what_is_below_the_threshold_and_nothing_else() -> None:
    request = Case(bits=(8, 8), rows=300, sparse=4e-3, queries=2).request()
    keys, values = ((r.words, r.scales, r.biases) for r in (request.keys, request.values))
    options = {"scale": request.scale, "return_lse": True}
    out, scores, lse = operation(
        request.queries, *keys, *values, sparse_v_threshold=4e-3, **options
    )
    full, same_scores, same_lse = operation(request.queries, *keys, *values, **options)
    assert mx.array_equal(scores, same_scores) and mx.array_equal(lse, same_lse)
    weights = mx.exp(scores - lse[..., None])
    dropped = mx.where(weights < 4e-3, weights, 0.0)
    assert 0.05 < dropped.sum(-1).max() < 0.95
    rows = composed.dense(request.values)
    assert mx.allclose(full - out, dropped @ rows, atol=1e-5) and not mx.allclose(full, out)


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


def test_values_have_bits_and_a_size_of_their_own() -> None:
    wide = operation(QUERIES, *packed(), *packed(size=128, bits=4), scale=0.1, v_bits=4)
    assert wide[0].shape == (1, 4, 1, 128)


class WithoutKernel:
    """A back end that knows dense attention only."""

    name = "dense_only"

    def unavailable_reason(self) -> str:
        return ""

    def refuses(self, request: AttentionRequest) -> str:
        return "it has no quantised attention" if request.is_packed else ""

    def attention(self, request: object) -> None:
        raise AssertionError


def test_a_back_end_without_it_refuses_by_name() -> None:
    remove = register("dense_only", WithoutKernel())
    try:
        with (
            mlx_h2o.use_backend("dense_only"),
            pytest.raises(ValueError, match="'dense_only' cannot serve this call: it has no quant"),
        ):
            operation(QUERIES, *packed(), *packed(), scale=0.1)
    finally:
        remove()


def test_a_call_without_a_named_back_end_equals_the_composition() -> None:
    with mlx_h2o.use_backend("composed"):
        named = operation(QUERIES, *packed(), *packed(), scale=0.1)
    unnamed = operation(QUERIES, *packed(), *packed(), scale=0.1, stream=mx.cpu)
    assert all(mx.allclose(a, b, atol=1e-5) for a, b in zip(named, unnamed, strict=True))
