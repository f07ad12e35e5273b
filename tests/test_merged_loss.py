"""What merging loses: the demo model on the package's caches, and on the slow reference."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3
from numpy.typing import NDArray

import mlx_h2o
from cache_columns import SIZE, rounded
from mlx_h2o import evaluate
from reference_cache import ReferenceCache

TOKENS, ROWS = 130, 40
TOLERANCE = 0.003
"""Nats. At 4 bits a code that float32 rounds otherwise can cost more than that in so few tokens."""


class Simulated:
    """A layer's cache for the model: hands out what comes, and attends to the reference's rows."""

    state = ()

    def __init__(self, config: mlx_h2o.H2OConfig) -> None:
        self.rows, self.offset = ReferenceCache(config, 2), 0
        self.bits = config.kv_bits

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        came = [np.array(rows.astype(mx.float32))[0] for rows in (keys, values)]
        self.rows.update(*(rounded(rows, self.bits) for rows in came))
        self.offset += keys.shape[2]
        return keys, values

    def attend(self, queries: mx.array, *_: Any, scale: float, **__: Any) -> mx.array:
        seen = self.rows.attend(np.array(queries.astype(mx.float32), np.float64)[0], scale)
        return mx.array(seen[None].astype(np.float32)).astype(queries.dtype)


def losses(model: Any, cache: list[Any], tokens: list[int]) -> NDArray[np.float64]:
    return np.array(evaluate.teacher_forced(model, cache, tokens, first=1, chunk=1).losses)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_bits", [None, 8])
def test_the_loss_is_that_of_the_reference(
    kv_bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = mlx_h2o.load("demo")
    tokens = tokenizer.encode(mlx_h2o.demo.text())[:TOKENS]
    packed = {} if kv_bits is None else {"kv_bits": kv_bits, "kv_group_size": SIZE}
    ours = mlx_h2o.make_prompt_cache(model, ROWS, policy="merge", **packed)
    found = losses(model, ours, tokens)
    window = losses(model, mlx_h2o.make_prompt_cache(model, ROWS, policy="window"), tokens)

    simulated: list[Any] = [Simulated(cache.config) for cache in ours]
    monkeypatch.setattr(
        qwen3,
        "scaled_dot_product_attention",
        lambda queries, keys, values, cache, **given: cache.attend(queries, **given),
    )
    expected = losses(model, simulated, tokens)

    assert all(layer.rows.evicted > 50 for layer in simulated)
    assert found.mean() == pytest.approx(expected.mean(), abs=TOLERANCE)
    # What the caches do matters to the loss more than that.
    assert abs(window.mean() - expected.mean()) > 3 * TOLERANCE
