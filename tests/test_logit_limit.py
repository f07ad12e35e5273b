"""A limit of logits, on and off, on every back end."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import c_api
import c_api_operations
from emulator import EmulatorBackend
from mlx_h2o import fast, use_backend
from mlx_h2o.operations.backends import register

LIMIT = 0.4


def inputs() -> tuple[mx.array, tuple[mx.array, ...], tuple[mx.array, ...]]:
    random = np.random.default_rng(7)
    q, k, v = (mx.array(random.standard_normal(s).astype(np.float32))
               for s in ((1, 4, 2, 64), (1, 2, 70, 64), (1, 2, 70, 64)))  # fmt: skip
    return q, tuple(mx.quantize(k, bits=8)), tuple(mx.quantize(v, bits=8))


def expected(limit: float) -> tuple[np.ndarray, np.ndarray]:
    q, keys, values = inputs()
    k, v = (np.array(mx.dequantize(*rows, bits=8), np.float64) for rows in (keys, values))
    k, v = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
    scores = 0.2 * np.array(q, np.float64) @ k.swapaxes(2, 3)
    scores = np.clip(scores, -limit, limit) if limit else scores
    weights = np.exp(scores)
    return weights / weights.sum(-1, keepdims=True) @ v, scores


@pytest.mark.parametrize("limit", [0.0, LIMIT])
@pytest.mark.parametrize("backend", ["composed", "native", "emulator"])
def test_back_ends(backend: str, limit: float) -> None:
    remove = register("emulator", EmulatorBackend()) if backend == "emulator" else None
    q, k, v = inputs()
    try:
        with use_backend(backend):
            found = fast.scaled_dot_product_attention_quantized_with_scores(
                q, *k, *v, scale=0.2, logit_limit=limit
            )
    finally:
        if remove:
            remove()
    for one, other in zip(found, expected(limit), strict=True):
        np.testing.assert_allclose(np.array(one), other, atol=2e-5)


@pytest.mark.parametrize("limit", [0.0, LIMIT])
@pytest.mark.parametrize("backend", ["composed", "native"])
def test_c(backend: str, limit: float) -> None:
    library = c_api.required()
    q, k, v = inputs()
    handles = (library.array(q), *(tuple(map(library.array, rows)) for rows in (k, v)))
    with library.using(backend):
        found = c_api_operations.quantized_attention(
            library, *handles, scale=0.2, logit_limit=limit
        )
    for name, other in zip(("out", "scores"), expected(limit), strict=True):
        np.testing.assert_allclose(library.numpy(found[name]), other, atol=2e-5)


def test_a_limit_below_zero_is_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="logit_limit is -1.0, expected at least 0"):
        fast.scaled_dot_product_attention_quantized_with_scores(
            q, *k, *v, scale=0.2, logit_limit=-1
        )
