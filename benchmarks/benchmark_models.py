"""The models that the benchmarks of decoding run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

import mlx_h2o

__all__ = ["MODELS", "parameters"]


def demo_model() -> Any:
    """The demo model, 5.5 million parameters."""
    return mlx_h2o.load("demo")[0]


def random_model() -> Any:
    """Random weights in the shape of a model of about 100 million parameters."""
    mx.random.seed(0)
    model = qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=768,
            num_hidden_layers=14,
            intermediate_size=2048,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
            rms_norm_eps=1e-6,
            vocab_size=8192,
            max_position_embeddings=4096,
            rope_theta=50000.0,
            tie_word_embeddings=True,
        )
    )
    mx.eval(model.parameters())
    return model


MODELS: dict[str, Callable[[], Any]] = {"demo": demo_model, "random-100m": random_model}


def parameters(model: Any) -> int:
    """How many numbers a model has."""
    return sum(array.size for _, array in tree_flatten(model.parameters()))
