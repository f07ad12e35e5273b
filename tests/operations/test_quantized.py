"""Attention over packed keys and values: its definition, its errors, and who serves it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
import reference
from emulator.cases import DTYPES, Case, errors
from mlx_h2o.operations import composed
from mlx_h2o.operations.arguments import BITS
from mlx_h2o.operations.backends import register
from mlx_h2o.operations.requests import QUANTIZED_ATTENTION, AttentionRequest

operation = mlx_h2o.fast.scaled_dot_product_attention_quantized_with_scores


def _cases() -> Iterator[Case]:
    for bits in BITS:
        for group in (32, 64, 128):
            other = BITS[BITS.index(bits) - 1]
            yield Case(sizes=(128, 256), bits=(bits, other), group=group, rows=20, slack=2)
    for dtype in DTYPES:
        for mask in ("", "causal", "bool", "add-f32"):
            yield Case(
                dtype=dtype, mask=mask, sinks=dtype, bits=(8, 4), queries=3, heads=(4, 2), batch=2
            )
        yield Case(dtype=dtype, scales="f16", bits=(4, 4), queries=12, mask="causal")
    yield Case(bits=(8, 8), rows=300, sparse=4e-3, mask="causal", queries=2, sinks="f32")
    for mask in ("", "causal", "bool", "add-f32"):
        yield Case(bits=(8, 4), rows=300, sparse=4e-3, mask=mask, queries=2, skipped=True)
    yield Case(bits=(8, 8), mask="bool", sinks="f32", skipped=True)


@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_composed_is_the_definition(case: Case) -> None:
    request = case.request()
    result = composed.attention(request)
    assert max(errors(request, result).values()) <= 1, errors(request, result)


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


def changed(at: int, array: mx.array, **options: object) -> tuple[list, dict]:
    arguments = [QUERIES, *packed(), *packed()]
    arguments[at] = array
    return arguments, {"scale": 1.0, **options}


def plain(**options: object) -> tuple[list, dict]:
    return [QUERIES, *packed(), *packed()], {"scale": 1.0, **options}


WORDS, SCALES, _ = packed()

FREE = "every size at least 1"
FLOATS = "float32, float16 or bfloat16"
OF_VALUES = "uint32 [B, Hkv, N, Dv * v_bits / 32] = (1, 2, 10, Dv * v_bits / 32), " + FREE
REFUSED = {
    f"queries are float32 (4, 1, 64), expected {FLOATS} [B, Hq, Lq, D], {FREE}.": changed(
        0, QUERIES[0]
    ),
    f"queries are float32 (1, 4, 0, 64), expected {FLOATS} [B, Hq, Lq, D], {FREE}.": changed(
        0, QUERIES[:, :, :0]
    ),
    f"queries are int32 (1, 4, 1, 64), expected {FLOATS} [B, Hq, Lq, D], {FREE}.": changed(
        0, QUERIES.astype(mx.int32)
    ),
    "key words are uint32 (2, 10, 16), expected uint32 [B, Hkv, N, D * bits / 32] = (1, Hkv, N, "
    f"16), {FREE}, Hkv a divisor of Hq = 4.": changed(1, WORDS[0]),
    "value scales are float32 (1, 2, 0, 1), expected float32 [B, Hkv, N, Dv / group_size] = "
    "(1, 2, 10, 1).": changed(5, SCALES[:, :, :0]),
    "key words are float32 (1, 2, 10, 16), expected uint32 [B, Hkv, N, D * bits / 32] = (1, Hkv, "
    f"N, 16), {FREE}, Hkv a divisor of Hq = 4.": changed(1, WORDS.astype(mx.float32)),
    "value biases are float16 (1, 2, 10, 1), expected float32 [B, Hkv, N, Dv / group_size] = "
    "(1, 2, 10, 1).": changed(6, SCALES.astype(mx.float16)),
    "key words are uint32 (1, 2, 10, 15), expected uint32 [B, Hkv, N, D * bits / 32] = (1, Hkv, "
    f"N, 16), {FREE}, Hkv a divisor of Hq = 4.": changed(1, WORDS[..., :15]),
    "values have 15 words per row of 8 bits, expected a multiple of group_size = 64 "
    "elements.": changed(4, WORDS[..., :15]),
    f"key scales are float32 (1, 2, 9, 1), expected {FLOATS} [B, Hkv, N, D / group_size] = "
    "(1, 2, 10, 1).": changed(2, SCALES[:, :, :9]),
    "keys have 32 elements per row of 8 bits, expected a multiple of group_size = 64 "
    "elements.": changed(0, QUERIES[..., :32]),
    "key words are uint32 (1, 2, 10, 16), expected uint32 [B, Hkv, N, D * bits / 32] = (2, Hkv, "
    f"N, 16), {FREE}, Hkv a divisor of Hq = 4.": changed(0, mx.repeat(QUERIES, 2, 0)),
    "key words are uint32 (1, 2, 10, 16), expected uint32 [B, Hkv, N, D * bits / 32] = (1, Hkv, "
    f"N, 16), {FREE}, Hkv a divisor of Hq = 3.": changed(0, QUERIES[:, :3]),
    f"value words are uint32 (1, 2, 9, 16), expected {OF_VALUES}.": (
        [QUERIES, *packed(), *packed(rows=9)],
        {"scale": 1.0},
    ),
    f"value words are uint32 (1, 1, 10, 16), expected {OF_VALUES}.": (
        [QUERIES, *packed(), *packed(heads=1)],
        {"scale": 1.0},
    ),
    "value scales are float16 (1, 2, 10, 1), expected float32 [B, Hkv, N, Dv / group_size] = "
    "(1, 2, 10, 1).": (
        [QUERIES, *packed(), packed()[0], *(a.astype(mx.float16) for a in packed()[1:])],
        {"scale": 1.0},
    ),
    "bits is 7, expected one of (2, 3, 4, 5, 6, 8).": plain(bits=7),
    "v_bits is 16, expected one of (2, 3, 4, 5, 6, 8).": plain(v_bits=16),
    "group_size is 48, expected one of (32, 64, 128).": plain(group_size=48),
    "scale is nan, expected a finite number.": plain(scale=math.nan),
    "sparse_v_threshold is 1.0, expected at least 0 and below 1.": plain(sparse_v_threshold=1.0),
    "sparse_v_threshold is -1e-06, expected at least 0 and below 1.": plain(
        sparse_v_threshold=-1e-6
    ),
    "mask is 'full', expected 'causal', an array or None.": plain(mask="full"),
    f"mask is float32 (9,), expected bool, {FLOATS} that broadcasts to [B, Hq, Lq, N] = (1, 4, 1, "
    "10).": plain(mask=mx.zeros((9,))),
    f"sinks are float32 (2,), expected {FLOATS} [Hq] = (4,).": plain(sinks=mx.zeros((2,))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_says_what_it_found_and_what_it_expected(message: str) -> None:
    arguments, options = REFUSED[message]
    with pytest.raises(ValueError) as caught:
        operation(*arguments, **options)
    assert str(caught.value) == f"[{QUANTIZED_ATTENTION}] {message}"


WRONG_TYPES = {
    "key scales must be an mlx.core.array, found list.": changed(2, [1.0]),
    "bits must be an integer, found float.": plain(bits=8.0),
    "v_bits must be an integer, found str.": plain(v_bits="4"),
    "group_size must be an integer, found bool.": plain(group_size=True),
    "sparse_v_threshold must be a number, found NoneType.": plain(sparse_v_threshold=None),
}


@pytest.mark.parametrize("message", WRONG_TYPES)
def test_what_is_of_another_type_is_a_type_error(message: str) -> None:
    arguments, options = WRONG_TYPES[message]
    with pytest.raises(TypeError) as caught:
        operation(*arguments, **options)
    assert str(caught.value) == f"[{QUANTIZED_ATTENTION}] {message}"
