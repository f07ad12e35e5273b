"""Routing: which cache gets which scores, what is refused, and that mlx_lm is restored."""

import importlib.util
import pkgutil
import sys
import types

import mlx.core as mx
import mlx_lm.models
import mlx_lm.models.base
import mlx_lm.models.cache as mlx_lm_cache
import numpy as np
import pytest

from mlx_h2o import H2OConfig, H2OKVCache, fast, routing
from routing_checks import SETTINGS, base, llama, patched, qwen3
from tiny_models import tiny_qwen3

pytestmark = pytest.mark.usefixtures("mlx_lm_stays_as_it_is")

# Which modules


@pytest.mark.parametrize("of_a_model", [True, False])
def test_the_modules_of_the_model_are_replaced_or_without_one_all_that_are_loaded(of_a_model):
    with routing(tiny_qwen3() if of_a_model else None):
        assert patched(qwen3)
        assert patched(llama) is patched(base) is not of_a_model


def test_modules_imported_meanwhile_are_put_back_too():
    name = "mlx_lm.models.starcoder2"
    sys.modules.pop(name, None)
    with routing():
        module = importlib.import_module(name)
        assert patched(module)
    assert not patched(module)
    assert module.scaled_dot_product_attention is base.scaled_dot_product_attention


def custom_module(tmp_path, text: str):
    """A model file as mlx_lm loads it: not in sys.modules, not in its package."""
    file = tmp_path / "custom.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("custom_model", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CUSTOM = """
import mlx.core as mx
import mlx.nn as nn
{imported}

class Attention(nn.Module):
    def __call__(self, x, cache):
        q = k = v = x[:, None]
        k, v = cache.update_and_fetch(k, v)
        return {name}(q, k, v, cache={passed}, scale=1.0, mask=None)

class Inherits(Attention):
    pass

class Model(nn.Module):
    def __init__(self):
        self.layers = [Inherits()]
    def __call__(self, x, cache):
        return self.layers[0](x, cache[0])
"""
BY_NAME = "from mlx_lm.models.base import scaled_dot_product_attention"
BY_MODULE = "from mlx_lm.models import base"


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("imported", "name"), [
    (BY_NAME, "scaled_dot_product_attention"), (BY_MODULE, "base.scaled_dot_product_attention"),
])  # fmt: skip
@pytest.mark.parametrize("passed", ["cache", "None", "[cache, None]", "'another layer'"])
def test_custom_model_files_and_whatever_they_pass(tmp_path, imported, name, passed):
    module = custom_module(tmp_path, CUSTOM.format(imported=imported, name=name, passed=passed))
    model, caches = module.Model(), [H2OKVCache(H2OConfig.of(max_kv_size=8, **SETTINGS))]
    before = dict(vars(module))
    with routing(model):
        for _ in range(12):
            mx.eval(model(mx.random.normal((1, 1, 8)), caches))
    assert caches[0].evicted == 4
    assert vars(module) == before


@pytest.mark.parametrize("handed_out", [True, False])
def test_the_argument_serves_where_the_keys_are_not_the_ones_handed_out(handed_out):
    """Keys identify their cache, and another layer's stock cache does not hide ours."""
    ours, stock = H2OKVCache(H2OConfig.of(max_kv_size=8, **SETTINGS)), mlx_lm_cache.KVCache()
    x = mx.random.normal((1, 2, 1, 8))
    with routing():
        keys, values = ours.update_and_fetch(x, x)
        keys, cache = (keys, stock) if handed_out else (keys * 1, ours)
        base.scaled_dot_product_attention(x, keys, values, cache=cache, scale=1.0, mask=None)
    assert not np.isnan(np.array(ours.scores)).any()


# Outputs and scores


@pytest.mark.matrix(8)
@pytest.mark.parametrize("length", [1, 8, 9, 129])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "additive"])
def test_output_and_scores_of_any_length(length, mask):
    """The stock output, and the moving average of the last 128 queries' scores."""
    rng = np.random.default_rng(length)
    q, k, v = (
        mx.array(rng.standard_normal((2, h, length, 16)).astype(np.float32)) for h in (4, 2, 2)
    )
    allowed = rng.random((length, length)) < 0.8
    allowed[:, 0] = True
    masks = {
        None: None,
        "causal": "causal",
        "bool": mx.array(allowed),
        "additive": mx.where(mx.array(allowed), 0.0, mx.finfo(mx.float32).min),
    }
    ours = H2OKVCache(H2OConfig.of(max_kv_size=256, policy="h2o-ema"))
    with routing():
        keys, values = ours.update_and_fetch(k, v)
        found = base.scaled_dot_product_attention(q, keys, values, ours, 0.25, masks[mask])
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=masks[mask])
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)
    _, scores = fast.scaled_dot_product_attention_with_scores(q, k, v, scale=0.25, mask=masks[mask])
    slow = H2OKVCache(H2OConfig.of(max_kv_size=256, policy="h2o-ema"))
    slow.update_and_fetch(k, v)
    slow.update_scores(scores)
    np.testing.assert_allclose(np.array(ours.scores), np.array(slow.scores), rtol=1e-4, atol=1e-6)


def test_sinks_reach_attention():
    x = mx.random.normal((1, 2, 1, 8))
    sinks = mx.array([3.0, -1.0])
    for length in (1, 9):
        q = mx.random.normal((1, 2, length, 8))
        ours = H2OKVCache(H2OConfig.of(max_kv_size=32, policy="h2o-ema"))
        with routing():
            keys, values = ours.update_and_fetch(mx.repeat(x, 9, axis=2), mx.repeat(x, 9, axis=2))
            found = base.scaled_dot_product_attention(q, keys, values, ours, 1.0, None, sinks=sinks)
        expected = mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=1.0, mask=None, sinks=sinks
        )
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)


def test_dtypes_are_promoted_as_mlx_does():
    ours = H2OKVCache(H2OConfig.of(max_kv_size=8, **SETTINGS))
    q, x = mx.random.normal((1, 2, 1, 8)), mx.random.normal((1, 2, 1, 8)).astype(mx.float16)
    with routing():
        keys, values = ours.update_and_fetch(x, x)
        out = base.scaled_dot_product_attention(q, keys, values, ours, 1.0, None)
    assert out.dtype == mx.float32


def test_stock_caches_are_served_by_the_original(monkeypatch):
    calls = []

    def original(*args, **kwargs):
        calls.append((args, kwargs))
        return mx.zeros((1,))

    with monkeypatch.context() as patch:
        patch.setattr(qwen3, "scaled_dot_product_attention", original)
        with routing(tiny_qwen3()):
            assert qwen3.scaled_dot_product_attention is not original
            x = mx.zeros((1, 1, 1, 8))
            qwen3.scaled_dot_product_attention(x, x, x, cache=None, scale=1.0, mask=None)
            stock = mlx_lm_cache.KVCache()
            qwen3.scaled_dot_product_attention(x, x, x, stock, 1.0, "causal", sinks=None)
        assert qwen3.scaled_dot_product_attention is original
    assert calls[0][1]["cache"] is None
    assert calls[1][0][3:] == (stock, 1.0, "causal")
    assert calls[1][1] == {"sinks": None}


# What is refused


@pytest.mark.slow
def test_every_model_module_that_binds_the_name_is_found():
    """All of mlx_lm's model files that import: replaced by routing(), and put back."""
    modules = []
    for found in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            module = importlib.import_module(f"mlx_lm.models.{found.name}")
        except (ImportError, SystemExit):  # needs a package that is not here
            continue
        if isinstance(vars(module).get("scaled_dot_product_attention"), types.FunctionType):
            modules.append(module)
    assert len(modules) > 90
    with routing():
        assert all(patched(module) for module in modules)
    assert not any(patched(module) for module in modules)
