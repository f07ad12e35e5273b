"""The cache within mlx_lm's asynchronous loop: arrays in use never change, no copy is needless.

generate_step computes token n + 1 while token n is processed, and MLX decides whether to write a
buffer in place or copy it when it schedules an operation. Reading an address in the usual way would
wait, and so change the behaviour under test. `_core.buffer_address` reads the address of a buffer
that is being computed, and neither waits nor holds it. An array that is copied twice within
one token, back to its old place, would be missed.
"""

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

import mlx_h2o
from back_ends import NATIVE
from tiny_models import tiny_qwen3

BUDGET, TOKENS = 32, 20
PARTS = ("words", "scales", "biases")


def stored_arrays(cache):
    """The arrays that a cache stores, themselves: a view would be another array.

    But for positions: those of the newest rows follow from the offset and are not stored, and all
    are written anew when rows go, 4 bytes per row and head.
    """
    found, tail = dict(cache._table.beside), cache._table.tail
    found.pop("positions", None)
    for name, parts in zip(("keys", "values"), tail.sides(tail.parts), strict=True):
        names = [name] if len(parts) == 1 else [f"{name}, {part}" for part in PARTS]
        found |= zip(names, parts, strict=True)
    return found


def copies(model, policy, bits=None, *, wait=False, hold=False):
    """Copies of each array in all layers, and their bytes, while tokens are written at the budget.

    Args:
        wait: for every token, so that nothing is under way.
        hold: the keys over ten tokens, in which they do not change.
    """
    from mlx_h2o import _core

    caches = mlx_h2o.make_prompt_cache(model, BUDGET, policy=policy, kv_bits=bits, kv_group_size=32)
    prompt = mx.arange(BUDGET // 2) % model.args.vocab_size
    addresses, moved, moved_bytes, held = {}, Counter(), Counter(), []

    def step(steps):
        next(steps)
        if wait:
            mx.synchronize()
        for layer, cache in enumerate(caches):
            for name, array in stored_arrays(cache).items():
                address = _core.buffer_address(array)
                assert address, "not under way"
                if addresses.get((layer, name), address) != address:
                    moved[name] += 1
                    moved_bytes[name] += array.nbytes
                addresses[layer, name] = address

    with mlx_h2o.use_backend("native"), mlx_h2o.routing(model):
        steps = generate_step(prompt, model, max_tokens=-1, prompt_cache=caches)
        while caches[0].offset < BUDGET:
            step(steps)
        moved.clear(), moved_bytes.clear()  # rows grow until then
        for token in range(TOKENS):
            if hold and token == 2:
                sides = [cache.keys for cache in caches]
                held = [part for side in sides for part in (side if bits else (side,))]
                expected = [np.array(array) for array in held]
            step(steps)
            if held and token == 12:
                assert all(map(np.array_equal, held, expected))
                held = []
        steps.close()
    return moved, moved_bytes.total()


@pytest.mark.matrix(4)
@NATIVE
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff", "tova"])
def test_a_full_cache_copies_nothing(policy, bits, wait):
    """Each array of keys and values is where it was at every step."""
    found, _ = copies(tiny_qwen3(head_dim=32), policy, bits, wait=wait)
    # This policy makes what it remembers anew at every step.
    assert set(found) == ({"importance"} if policy == "tova" else set())
    cache = mlx_h2o.make_prompt_cache(tiny_qwen3(), 8, kv_bits=bits, kv_group_size=32)[0]
    cache.update_and_fetch(mx.ones((1, 2, 3, 32)), mx.ones((1, 2, 3, 32)))
    assert len(stored_arrays(cache)) == (6 if bits else 2)


@NATIVE
@pytest.mark.parametrize("bits", [None, 8])
def test_keys_that_are_held_are_copied_once(bits):
    """And so the count sees a copy of each of their arrays."""
    found, nbytes = copies(tiny_qwen3(layers=2, head_dim=32), "h2o-ema", bits, hold=True)
    assert found == ({f"keys, {part}": 2 for part in PARTS} if bits else {"keys": 2})
    assert nbytes == 2 * (2 * BUDGET) * (32 + 4 + 4 if bits else 32 * 4)


@NATIVE
def test_an_address_waits_for_the_schedule_alone():
    from mlx_h2o import _core

    array = mx.ones((1000,)) + 1
    assert _core.buffer_address(array) == 0
    mx.async_eval(array)
    address = _core.buffer_address(array)
    mx.synchronize()
    assert address == _core.buffer_address(array) != 0
