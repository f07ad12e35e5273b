"""The loss of bounded caches: a small model on the package's caches, and on the slow reference."""

import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_h2o
import reference_frame
from cache_columns import SIZE, rounded
from readings import losses
from reference_cache import ReferenceCache

TOKENS, ROWS = 130, 40
FEW, MANY, LONG = 28, 84, 4
"""Rows by layer: those of most layers, and those of the layer with this index."""

CASES: dict[str, dict[str, Any]] = {
    "window": {"policy": "window"},
    "keydiff": {"policy": "keydiff"},
    "h2o": {"policy": "h2o"},
    "h2o, by layer": {"policy": "h2o"},
    "h2o, 8 bits": {"policy": "h2o", "recent_size": ROWS // 4, "kv_bits": 8, "kv_group_size": SIZE},
}
TOLERANCE = 0.003
"""Nats. At 4 bits a code that float32 rounds otherwise can cost more than that in so few tokens."""


class Simulated:
    """A layer's cache for the model: hands out what comes, and attends to the reference's rows."""

    state = ()

    def __init__(self, config: mlx_h2o.H2OConfig) -> None:
        self.rows, self.offset, self.bits = ReferenceCache(config, 2), 0, config.kv_bits

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        came = [np.array(rows.astype(mx.float32))[0] for rows in (keys, values)]
        if self.bits and not self.offset:  # packed rows have a frame
            self.rows.centres = reference_frame.centres(*came)
        self.rows.update(*map(rounded, came, [self.bits] * 2, self.rows.centres))
        self.offset += keys.shape[2]
        return keys, values

    def attend(self, queries: mx.array, *_: Any, scale: float, **__: Any) -> mx.array:
        seen = self.rows.attend(np.array(queries.astype(mx.float32), np.float64)[0], scale)
        return mx.array(seen[None].astype(np.float32)).astype(queries.dtype)


@pytest.mark.slow
@pytest.mark.matrix(2)
@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_that_of_the_reference(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = mlx_h2o.load("demo")
    tokens = tokenizer.encode(mlx_h2o.demo.text())[:TOKENS]
    rows = [ROWS] * len(model.layers)
    if case.endswith("by layer"):
        rows = [MANY if layer == LONG else FEW for layer in range(len(rows))]
    budgets = [mlx_h2o.H2OConfig.of(max_kv_size=count, **CASES[case]) for count in rows]
    ours = mlx_h2o.make_prompt_cache(model, budgets[0], budgets=budgets)
    with mlx_h2o.routing(model):
        found = losses(model, ours, tokens, first=1)
    full = make_prompt_cache(model)
    window = mlx_h2o.make_prompt_cache(model, ROWS, policy="window")
    other = losses(model, full if case == "window" else window, tokens, first=1)

    simulated: list[Any] = [Simulated(cache.config) for cache in ours]
    monkeypatch.setattr(
        importlib.import_module(type(model).__module__),
        "scaled_dot_product_attention",
        lambda queries, keys, values, cache, **given: cache.attend(queries, **given),
    )
    expected = losses(model, simulated, tokens, first=1)

    for layer, count in zip(simulated, rows, strict=True):
        assert layer.rows.evicted >= layer.offset - count
    assert found.mean() == pytest.approx(expected.mean(), abs=TOLERANCE)
    # What the caches do matters to the loss more than that.
    assert abs(other.mean() - expected.mean()) > 3 * TOLERANCE
