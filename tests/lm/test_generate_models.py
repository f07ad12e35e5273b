"""Models of several kinds, tiny and random, of mlx_lm's own classes: served, or refused by name."""

from __future__ import annotations

import importlib

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache
import numpy as np
import pytest

from mlx_h2o import make_prompt_cache, routing
from mlx_h2o.lm.generate import summary
from tiny_models import random_prompt

# What any of the models may ask for; each takes what it knows.
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    # mixtures of experts
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # GPT-2
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "n_ctx": 512,
    "n_positions": 512,
    # Gemma 2
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 16,
}


def tiny(name: str):
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict({**SIZES, "model_type": name}))
    mx.eval(model.parameters())
    return model


def logits(model, caches, tokens: list[int]) -> np.ndarray:
    """A prompt in chunks, long and short ones, the rest one by one."""
    parts = [tokens[:12], tokens[12:19], tokens[19:24], *[[token] for token in tokens[24:]]]
    found = []
    for part in parts:
        found.append(model(mx.array(part)[None], cache=caches)[0])
        mx.eval(found[-1], [cache.state for cache in caches])
    return np.array(mx.concatenate(found).astype(mx.float32))


# Queries normalised, grouped, rotated in part or not at all; experts; latents; GPT-2's positions.
SERVED = ["gemma", "gpt2", "phi", "phi3", "olmo2", "mixtral", "cohere", "glm4", "deepseek_v3"]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", SERVED)
def test_models_are_served(name):
    model, tokens = tiny(name), random_prompt(40)
    expected = logits(model, mlx_lm_cache.make_prompt_cache(model), tokens)
    with routing(model):
        unbounded = logits(model, make_prompt_cache(model, 64), tokens)
        bounded = make_prompt_cache(model, 16)
        assert np.isfinite(logits(model, bounded, tokens)).all()
    np.testing.assert_allclose(unbounded, expected, rtol=0, atol=1e-4)
    found = summary(bounded)
    assert (found.evicting, found.rows, found.evicted) == (2, 16, 48)


def test_a_model_with_its_own_softmax_is_refused_by_name():
    model = tiny("gemma2")
    with pytest.raises(ValueError, match=r"\[routing\] gemma2 does not call"), routing(model):
        pytest.fail("entered")
    # A policy that needs no scores serves it.
    caches = make_prompt_cache(model, 16, policy="keydiff")
    assert np.isfinite(logits(model, caches, random_prompt(40))).all()
    assert summary(caches).rows == 16
