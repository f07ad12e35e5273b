"""The cache within mlx_lm's asynchronous loop: nothing held changes, nothing is copied for nothing.

The counting is benchmarks/copied_bytes.py's.
"""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

from back_ends import NATIVE
from mlx_h2o import make_prompt_cache
from paths import BENCHMARKS
from tiny_models import tiny_qwen3

SCRIPT = "copied_bytes"

BUDGET = 32
FILE = BENCHMARKS / "copied_bytes.py"


@pytest.mark.matrix(8)
@NATIVE
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff", "tova"])
def test_a_full_cache_copies_nothing(benchmark, policy, bits, wait):
    """Each array of keys and values is where it was at every step."""
    arm = benchmark.Arm("ours", policy, "native", wait=wait, bits=bits)
    found = benchmark.measure(arm, tiny_qwen3(head_dim=32), BUDGET, 20)["at the budget"]
    assert (found["tokens"], found["not_under_way"]) == (20, 0)
    # This policy makes what it remembers anew at every step.
    assert set(found["copies_of_an_array"]) == ({"importance"} if policy == "tova" else set())
    cache = make_prompt_cache(tiny_qwen3(), 8, kv_bits=bits, kv_group_size=32)[0]
    cache.update_and_fetch(mx.ones((1, 2, 3, 32)), mx.ones((1, 2, 3, 32)))
    assert len(benchmark.stored_arrays(cache)) == (6 if bits else 2)


@NATIVE
@pytest.mark.parametrize("bits", [None, 8])
def test_keys_that_are_held_are_copied_once(benchmark, bits):
    """And so the count sees a copy of each of their arrays."""
    arm = benchmark.Arm("held", "h2o-ema", "native", hold=True, bits=bits)
    found = benchmark.measure(arm, tiny_qwen3(layers=2, head_dim=32), BUDGET, 20)
    assert found["held_keys_unchanged"]
    arrays = [f"keys, {part}" for part in benchmark.PARTS] if bits else ["keys"]
    assert found["at the budget"]["copies_of_an_array"] == dict.fromkeys(arrays, 2)
    row = 32 + 4 + 4 if bits else 32 * 4
    assert found["at the budget"]["copied_bytes"] == 2 * (2 * BUDGET) * row


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
