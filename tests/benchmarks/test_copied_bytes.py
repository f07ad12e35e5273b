"""The cache within mlx_lm's asynchronous loop: nothing held changes, nothing is copied for nothing.

The counting is benchmarks/copied_bytes.py's.
"""

from __future__ import annotations

import json
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from back_ends import NATIVE
from mlx_h2o import make_prompt_cache, routing, use_backend
from paths import BENCHMARKS
from tiny_models import random_prompt, tiny_qwen3

SCRIPT = "copied_bytes"

BUDGET = 32
FILE = BENCHMARKS / "copied_bytes.py"


@pytest.mark.parametrize("backend", [None, "composed"])
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff"])
def test_keys_held_within_the_loop_stay_for_ten_steps(policy, backend):
    model = tiny_qwen3()
    caches = make_prompt_cache(model, BUDGET, policy=policy)
    with routing(model), use_backend(backend) if backend else nullcontext():
        steps = generate_step(
            mx.array(random_prompt(BUDGET + 8)), model, max_tokens=-1, prompt_cache=caches
        )
        for _ in range(3):
            next(steps)
        held = [array for cache in caches for array in (cache.keys, cache.values)]
        before = [np.array(array) for array in held]
        evicted = caches[0].evicted
        for _ in range(10):
            next(steps)
        assert caches[0].evicted == evicted + 10
        for array, expected in zip(held, before, strict=True):
            np.testing.assert_array_equal(np.array(array), expected)
        # The cache itself went on.
        now = [array for cache in caches for array in (cache.keys, cache.values)]
        assert not any(np.array_equal(a, b) for a, b in zip(now, before, strict=True))
        steps.close()


@NATIVE
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff"])
def test_a_full_cache_copies_nothing(benchmark, policy, wait):
    arm = benchmark.Arm("ours", policy, "native", wait=wait)
    found = benchmark.measure(arm, tiny_qwen3(), BUDGET, 20)["at the budget"]
    assert (found["tokens"], found["not_under_way"]) == (20, 0)
    assert found["copied_bytes"] == 0


@pytest.mark.matrix(6)
@NATIVE
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff", "tova"])
def test_a_full_cache_of_packed_rows_copies_nothing(benchmark, policy, bits, wait):
    """Words, scales and biases of keys and values, each where it was at every step."""
    arm = benchmark.Arm("packed", policy, "native", wait=wait, bits=bits)
    model = tiny_qwen3(head_dim=32)
    found = benchmark.measure(arm, model, BUDGET, 20)["at the budget"]
    assert (found["tokens"], found["not_under_way"]) == (20, 0)
    # This policy makes what it remembers anew at every step, here and for dense rows.
    anew = {"importance"} if policy == "tova" else set()
    assert set(found["copies_of_an_array"]) == anew
    watched = benchmark.stored_arrays(make_prompt_cache(model, 8, kv_bits=bits)[0])
    assert watched == {}  # there is nothing yet
    cache = make_prompt_cache(model, 8, kv_bits=bits, kv_group_size=32)[0]
    cache.update_and_fetch(mx.ones((1, 2, 3, 32)), mx.ones((1, 2, 3, 32)))
    assert len(benchmark.stored_arrays(cache)) == 6


@NATIVE
def test_packed_keys_that_are_held_are_copied_once(benchmark):
    """And so the count sees a copy of each of their arrays."""
    arm = benchmark.Arm("held", "h2o-ema", "native", hold=True, bits=8)
    found = benchmark.measure(arm, tiny_qwen3(layers=2, head_dim=32), BUDGET, 20)
    assert found["held_keys_unchanged"]
    copies = found["at the budget"]["copies_of_an_array"]
    assert copies == {f"keys, {part}": 2 for part in benchmark.PARTS}
    assert found["at the budget"]["copied_bytes"] == 2 * (2 * BUDGET) * (32 + 4 + 4)


@NATIVE
def test_keys_that_are_held_are_copied_once(benchmark):
    """And so the count sees a copy where there is one."""
    arm = benchmark.Arm("held", "h2o-ema", "native", hold=True)
    found = benchmark.measure(arm, tiny_qwen3(layers=2), BUDGET, 20)
    assert found["held_keys_unchanged"]
    assert found["at the budget"]["copies_of_an_array"] == {"keys": 2}
    assert found["at the budget"]["copied_bytes"] == 2 * (2 * BUDGET * 16) * 4


@NATIVE
def test_an_address_waits_for_the_schedule_alone():
    from mlx_h2o import _core

    array = mx.ones((1000,)) + 1
    assert _core.buffer_address(array) == 0
    mx.async_eval(array)
    address = _core.buffer_address(array)
    mx.synchronize()
    assert address == _core.buffer_address(array) != 0


def test_the_committed_result_has_both_models():
    result = json.loads(FILE.parent.joinpath("results", "copied_bytes.json").read_text())
    assert {"machine", "mlx", "mlx_h2o"} <= result["environment"].keys()
    assert [run["model"] for run in result["runs"]] == ["demo", "random-100m"]
    for run in result["runs"]:
        for name in ("h2o, native", "window, native", "keydiff, native"):
            assert run["arms"][name]["at the budget"]["copied_bytes"] == 0
        assert run["arms"]["h2o, native, keys held"]["held_keys_unchanged"]
