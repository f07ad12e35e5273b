"""Thousands of steps of mlx_lm's own loop: memory grows only by what the caches hold."""

import gc
from contextlib import nullcontext

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from cache_checks import edges
from mlx_h2o import make_prompt_cache, routing
from tiny_models import random_prompt, tiny_qwen3

# What the steps in flight hold varies by some ten kilobytes. The graph of one step left hanging
# per step would be its scores for each: megabytes.
SLACK = 256 * 1024
PACKED = {"kv_bits": 8, "kv_group_size": 32}
ROWS = {"dense": {}, "8 bits": PACKED, "8 and 4": PACKED | {"light_bits": 4}}


@pytest.mark.slow
@pytest.mark.matrix(4)
@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff"])
def test_memory_is_flat_but_for_nbytes(policy, rows, evicts):
    """Dense rows of window and keydiff in plain mlx_lm, unrouted; below the budget the same."""
    dense = rows == "dense"
    count = 2000 if dense else 600
    budget = (32 if dense else 96) if evicts else count + 64
    model = tiny_qwen3(layers=1, head_dim=32)
    caches = make_prompt_cache(model, budget, policy=policy, **ROWS[rows])
    samples = []
    gc.collect()  # what other tests left would go meanwhile
    with nullcontext() if dense and policy != "h2o-ema" else routing(model):
        prompt = mx.array(random_prompt(16))
        steps = generate_step(prompt, model, max_tokens=count, prompt_cache=caches)
        for index, _ in enumerate(steps):
            if index % 50 == 49:
                held = mx.get_active_memory() - sum(cache.nbytes for cache in caches)
                samples.append((held, edges([cache.state[:4] for cache in caches])))
    memory, pending = zip(*samples, strict=True)
    assert (caches[0].offset, caches[0].evicted > 0) == (count + 16, evicts)
    assert max(memory) - min(memory) < SLACK
    # The arrays of the cache are a step away from what has been computed, not thousands; packed
    # rows that leave in groups are a longer step, which is over with the next.
    assert max(pending) < (150 if dense else 1000)
