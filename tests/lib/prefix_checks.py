"""Prompts with a common prefix, and caches that share its rows."""

import copy

import mlx.core as mx
import numpy as np

from mlx_h2o import BatchH2OKVCache, H2OKVCache, make_prompt_cache, routing, stream_generate
from mlx_h2o.lm.generate import read_prompt
from mlx_h2o.lm.sharing import share
from tiny_models import random_prompt, tiny_tokenizer

LENGTH = 48
PREFIX = random_prompt(LENGTH, seed=1)
PROMPTS = [PREFIX + random_prompt(length, seed=length) for length in (5, 70, 37)]
SMALL = {"max_kv_size": 80, "prefix_size": LENGTH}
PACKED = {"kv_bits": 8, "kv_group_size": 32}


def alone(model, prompt, count: int = 24, step: int = 24, **given) -> list[int]:
    caches = make_prompt_cache(model, **given)
    how = {"prompt_cache": caches, "prefill_step_size": step}
    found = stream_generate(model, tiny_tokenizer(), prompt, count, **how)
    return [response.token for response in found][:count]


def standing(model, count: int = 3, **given) -> list[list]:
    """Caches of several sequences, which have read the prefix and share its rows."""
    caches = make_prompt_cache(model, **SMALL | given)
    read_prompt(model, caches, PREFIX, 24)
    share(caches)
    return [copy.deepcopy(caches) for _ in range(count)]


def merged(caches: list[list]) -> list[BatchH2OKVCache]:
    return [H2OKVCache.merge(layer) for layer in zip(*caches, strict=True)]


def ran(model, caches, tokens) -> np.ndarray:
    with routing(model):
        return np.array(model(mx.array(tokens), cache=caches))
