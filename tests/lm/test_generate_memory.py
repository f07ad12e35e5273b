"""Thousands of steps of mlx_lm's own loop: memory is flat but for what the caches hold."""

from __future__ import annotations

import time
from contextlib import nullcontext

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from mlx_h2o import make_prompt_cache, routing
from tiny_models import random_prompt, tiny_qwen3

STEPS = 2000
# What the steps in flight hold varies by some ten kilobytes. The graph of one step left hanging
# per step would be 2,000 times its scores: megabytes.
SLACK = 256 * 1024


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("policy", "evicts"),
    [("h2o-ema", False), ("h2o-ema", True), ("window", False), ("window", True), ("keydiff", True)],
)
def test_memory_is_flat_but_for_nbytes(policy, evicts, capsys, tmp_path):
    """window and keydiff run in plain mlx_lm, unrouted; below the budget they do the same."""
    budget = 32 if evicts else STEPS + 64
    model = tiny_qwen3(layers=1)
    caches = make_prompt_cache(model, budget, policy=policy)
    samples, started = [], time.perf_counter()
    with routing(model) if policy == "h2o-ema" else nullcontext():
        prompt = mx.array(random_prompt(16))
        steps = generate_step(prompt, model, max_tokens=STEPS, prompt_cache=caches)
        for index, _ in enumerate(steps):
            if index % 100 == 99:
                held = mx.get_active_memory() - sum(cache.nbytes for cache in caches)
                samples.append((held, graph_edges(caches, tmp_path), time.perf_counter()))
    memory = [held for held, _, _ in samples]
    assert caches[0].offset == STEPS + 16
    assert (caches[0].evicted > 0) == evicts
    assert caches[0].size() == (budget if evicts else STEPS + 16)
    assert max(memory) - min(memory) < SLACK
    # The arrays of the cache are a step away from what has been computed, not thousands.
    assert max(edges for _, edges, _ in samples) < 150
    half = len(samples) // 2
    first, second = samples[half][2] - started, samples[-1][2] - samples[half][2]
    with capsys.disabled():
        print(
            f"\n{policy}, budget {budget}: memory beside the caches {min(memory):,} to "
            f"{max(memory):,} bytes; first half {first:.1f} s, second {second:.1f} s"
        )


@pytest.mark.matrix(2)
@pytest.mark.parametrize("policy", ["h2o-ema", "keydiff"])
@pytest.mark.parametrize("light_bits", [None, 4])
@pytest.mark.parametrize("evicts", [True, False])
@pytest.mark.slow
def test_memory_is_flat_with_packed_rows(policy, light_bits, evicts, tmp_path):
    budget, count = (96 if evicts else 700), 600
    model = tiny_qwen3(layers=1, head_dim=32)
    given = {"kv_bits": 8, "kv_group_size": 32, "light_bits": light_bits}
    caches = make_prompt_cache(model, budget, policy=policy, **given)
    samples = []
    with routing(model):
        prompt = mx.array(random_prompt(16))
        steps = generate_step(prompt, model, max_tokens=count, prompt_cache=caches)
        for index, _ in enumerate(steps):
            if index % 50 == 49:
                held = mx.get_active_memory() - sum(cache.nbytes for cache in caches)
                samples.append((held, graph_edges(caches, tmp_path)))
    assert (caches[0].evicted > 0) == evicts
    memory, edges = zip(*samples, strict=True)
    assert max(memory) - min(memory) < SLACK
    # Rows that leave in groups are a longer step, which is over with the next.
    assert max(edges) < 1000


def graph_edges(caches, tmp_path) -> int:
    """Edges of the graph that has not been computed yet behind the caches' arrays."""
    file = tmp_path / "graph.dot"
    arrays = [array for cache in caches for _, array in tree_flatten(list(cache.state[:4]))]
    mx.export_to_dot(str(file), *arrays)
    return file.read_text().count("->")
