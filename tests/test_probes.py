"""Attention with probes: what it returns, who serves it, and its errors."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from emulator.cases import Case, errors, probe_error
from mlx_h2o.operations import composed
from mlx_h2o.operations.backends import register
from mlx_h2o.operations.probes import WITH_PROBES

operation = mlx_h2o.fast.scaled_dot_product_attention_with_probes

CASES = [
    Case(probes=3, heads=(4, 2), queries=2, mask="causal", batch=2),
    Case(probes=1, dtype="f16", mask="add-f16", sinks="f16"),
    Case(probes=2, bits=(8, 4), heads=(4, 2), mask="bool"),
    Case(probes=2, dtype="bf16", bits=(4, 4), group=32, queries=12, sparse=1e-2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_composed_is_the_definition(case: Case) -> None:
    request = case.request()
    result = composed.attention(request)
    assert probe_error(request, result.probe_scores) <= 1
    assert max(errors(request, result).values()) <= 1


def rows(seed: int, count: int = 10, size: int = 64) -> mx.array:
    array = np.random.default_rng(seed).standard_normal((1, 2, count, size))
    return mx.array(array.astype(np.float32))


def packed(seed: int) -> tuple:
    return tuple(mx.quantize(rows(seed), group_size=64, bits=8))


QUERIES, PROBES = mx.ones((1, 4, 1, 64)), rows(3, count=1)


def test_rows_that_are_packed_are_scored_as_they_dequantise() -> None:
    with mlx_h2o.use_backend("composed"):
        expected = operation(QUERIES, rows(1), rows(2), PROBES, scale=0.1)
        # mx.quantize gives a list.
        found = operation(QUERIES, list(packed(1)), packed(2), PROBES, scale=0.1)
    assert mx.allclose(found[3], expected[3], atol=0.02)


def test_unnamed_on_a_cpu_it_agrees_with_composed() -> None:
    found = operation(QUERIES, rows(1), rows(2), PROBES, scale=0.1, stream=mx.cpu)
    request = Case(probes=1).request()
    request = replace(
        request, queries=QUERIES, keys=rows(1), values=rows(2), probes=PROBES, scale=0.1
    )
    assert max(errors(request, found[:3]).values()) <= 1 and probe_error(request, found[3]) <= 1


REFUSED = {
    "probes have 3 dimensions, expected 4 [B, Hkv, E, D].": (rows(1), rows(2), PROBES[0], {}),
    "probes have shape (1, 4, 1, 64), expected [B, Hkv, E, D] = (1, 2, E, 64) with E of at least "
    "1.": (rows(1), rows(2), QUERIES, {}),
    "probes have shape (1, 2, 0, 64), expected [B, Hkv, E, D] = (1, 2, E, 64) with E of at least "
    "1.": (rows(1), rows(2), PROBES[:, :, :0], {}),
    "probes have shape (1, 2, 1, 32), expected [B, Hkv, E, D] = (1, 2, E, 64) with E of at least "
    "1.": (packed(1), packed(2), PROBES[..., :32], {}),
    "probes are float16, expected the dtype of the queries, float32.": (
        rows(1), rows(2), PROBES.astype(mx.float16), {},
    ),
    "keys are packed and values are not, expected both or none.": (packed(1), rows(2), PROBES, {}),
    "values are packed and keys are not, expected both or none.": (rows(1), packed(2), PROBES, {}),
    "keys are 2 arrays, expected 3: words, scales and biases.": (
        packed(1)[:2], packed(2), PROBES, {},
    ),
    "sparse_v_threshold is 0.1, expected 0 for keys and values that are not packed.": (
        rows(1), rows(2), PROBES, {"sparse_v_threshold": 0.1},
    ),
    "bits is 7, expected one of (2, 3, 4, 5, 6, 8).": (packed(1), packed(2), PROBES, {"bits": 7}),
    "keys and values have lengths 10 and 9, expected the same.": (
        rows(1), rows(2, count=9), PROBES, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_says_what_it_found_and_what_it_expected(message: str) -> None:
    keys, values, probes, options = REFUSED[message]
    with pytest.raises(ValueError) as caught:
        operation(QUERIES, keys, values, probes, scale=1.0, **options)
    assert str(caught.value) == f"[{WITH_PROBES}] {message}"


class Tired:
    name = "tired"

    def unavailable_reason(self) -> str:
        return ""

    def refuses(self, request: object) -> str:
        return "it is tired"

    def attention(self, request: object) -> None:
        raise AssertionError


def test_a_named_back_end_that_refuses_says_which_operation() -> None:
    backend = Tired()
    remove = register(backend.name, backend)
    try:
        for keys, values in ((rows(1), rows(2)), (packed(1), packed(2))):
            with mlx_h2o.use_backend(backend.name), pytest.raises(ValueError) as caught:
                operation(QUERIES, keys, values, PROBES, scale=1.0)
            assert str(caught.value) == (
                f"[{WITH_PROBES}] back end 'tired' cannot serve this call: it is tired"
            )
    finally:
        remove()


def test_probes_must_be_an_array() -> None:
    with pytest.raises(TypeError, match=r"probes must be an mlx.core.array, found list"):
        operation(QUERIES, rows(1), rows(2), [1.0], scale=1.0)
