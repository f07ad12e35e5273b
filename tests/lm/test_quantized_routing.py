"""Quantised caches under whole models: with and without routing, in mlx_lm's loops, peak memory."""

import gc
from contextlib import nullcontext
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from mlx_h2o import QuantizedH2OKVCache, make_prompt_cache, routing, use_backend
from readings import in_parts, prefill
from tiny_models import random_prompt, tiny_llama, tiny_qwen3

SETTINGS = {"sink_size": 1, "recent_size": 6, "kv_group_size": 32}


def logits(model, caches, chunks, *, routed: bool = True) -> np.ndarray:
    with routing(model) if routed else nullcontext():
        found = in_parts(model, caches, random_prompt(sum(chunks)), *chunks)[0]
        return np.array(found.astype(mx.float32))


@pytest.mark.parametrize("backend", [None, "composed"])
@pytest.mark.parametrize("policy", ["window", "keydiff"])
def test_policies_without_scores_are_right_outside_of_routing(policy, backend):
    """mlx_lm's own attention finds packed rows by ``bits``, and arrays by its absence."""
    given = {"policy": policy, "kv_bits": 8, "kv_frame": False}
    model = tiny_llama()  # rows of 8 elements
    with pytest.raises(ValueError, match="llama layer 0 has keys of 8.*neither"):
        logits(model, make_prompt_cache(model, 24, **given), [4], routed=False)
    model = tiny_qwen3(head_dim=32)
    chunks = [20, *[1] * 20, 5, 12, 1, 1]
    fresh = partial(make_prompt_cache, model, 24, **given, **SETTINGS)
    with use_backend(backend):
        found = [logits(model, fresh(), chunks, routed=routed) for routed in (True, False)]
    np.testing.assert_allclose(*found, rtol=0, atol=1e-3 * np.abs(found[0]).max())


@pytest.mark.parametrize("norms", [("k_norm", "q_norm"), ("k_norm",)])
@pytest.mark.parametrize(
    "given", [{"kv_bits": 8}, {"kv_bits": 8, "kv_frame": False}, {"kv_format": "turbo4"},
              {"kv_format": "turbo0v4"}, {"kv_bits": 8, "light_bits": 4}], ids=str)  # fmt: skip
def test_keys_and_values_of_unlike_dtypes_are_packed(given, norms):
    """As of a model whose norms are float32, and the rest bfloat16."""
    model = tiny_qwen3(head_dim=32)
    model.set_dtype(mx.bfloat16)
    for layer in model.layers:
        for name in norms:
            layer.self_attn[name].set_dtype(mx.float32)
    fresh, chunks = partial(make_prompt_cache, model, 40, **given, **SETTINGS), [20, 3, *[1] * 9]
    found = [logits(model, fresh(), chunks)]
    late = make_prompt_cache(model, 40, **SETTINGS)
    logits(model, late, [9])
    logits(model, [one.to_quantized(32, 8) for one in late], [3, 1])
    model.set_dtype(mx.float32)
    found.append(logits(model, fresh(), chunks))
    np.testing.assert_allclose(*found, rtol=0, atol=0.1 * np.abs(found[0]).max())


def test_outside_of_routing_what_mlx_lm_cannot_read_is_an_error():
    model = tiny_qwen3(head_dim=32)
    given = {"policy": "window", "kv_bits": 8, **SETTINGS}
    framed = make_prompt_cache(model, 24, **given)
    with pytest.raises(ValueError, match=r"qwen3 layer 0 keeps its rows in a frame .*kv_frame"):
        logits(model, framed, [12, 1], routed=False)
    other_bits = make_prompt_cache(model, 24, v_bits=4, kv_frame=False, **given)
    with pytest.raises(ValueError, match="quantized_matmul"):
        logits(model, other_bits, [12, 1], routed=False)
    scoring = make_prompt_cache(model, 24, **given | {"policy": "h2o-ema", "kv_frame": False})
    with pytest.raises(RuntimeError, match=r"got no scores .* 'h2o-ema'"):
        logits(model, scoring, [4, 4], routed=False)


def test_mlx_lm_may_quantise_on_the_way():
    """Its ``kv_bits`` and ``quantized_kv_start``: dense rows first, then packed, the same tokens
    as where the cache is converted by hand."""
    model = tiny_qwen3(head_dim=64)
    prompt = mx.array(random_prompt(30))
    caches = make_prompt_cache(model, 24, sink_size=1, recent_size=6)
    with routing(model):
        steps = generate_step(
            prompt, model, max_tokens=12, prompt_cache=caches, kv_bits=8, quantized_kv_start=30
        )
        found = [int(token) for token, _ in steps]
    assert [type(cache) for cache in caches] == [QuantizedH2OKVCache] * 2
    assert all(cache.size() == 24 for cache in caches)
    own = make_prompt_cache(model, 24, sink_size=1, recent_size=6)
    with routing(model):
        tokens, fed = [], prompt
        for index in range(12):
            if index == 1:
                own = [cache.to_quantized(group_size=64, bits=8) for cache in own]
            if index == 0:
                model(fed[None, :-1], cache=own)
                mx.eval([cache.state for cache in own])
                fed = fed[-1:]
            fed = mx.argmax(model(fed[None], cache=own)[0, -1])[None]
            tokens.append(fed.item())
    assert found == tokens


@pytest.mark.slow
@pytest.mark.matrix(2)
@pytest.mark.parametrize("policy", ["h2o-ema", "window"])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_peak_of_prefill_stays_below_the_dense_caches(policy, bits):
    """Arrays are made for one layer at a time; every layer holds packed rows only."""
    model = tiny_qwen3(layers=8, kv_heads=4, head_dim=128)
    prompt = random_prompt(3 * 64)
    peaks = []
    for kv_bits in (None, bits):
        caches = make_prompt_cache(model, 128, policy=policy, kv_bits=kv_bits)
        mx.eval(model.parameters())
        gc.collect()  # what other tests left would go in between
        before = mx.get_active_memory()  # the model, and what other tests hold
        mx.clear_cache()
        mx.reset_peak_memory()
        prefill(model, caches, prompt, chunk=64)
        peaks.append(mx.get_peak_memory() - before)
        del caches
    assert peaks[1] < 0.8 * peaks[0]
