"""How long a step's walk is: its calls, and the files that a new key passes until it is stored.

A file counts if a function in it gets the key, up to the operation that stores it.
"""

import sys
from types import FrameType
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

import mlx_h2o
from back_ends import NATIVE
from benchmark_scripts import script
from mlx_h2o import H2OConfig, H2OKVCache, QuantizedH2OKVCache
from mlx_h2o.operations.backends import resolve

BUDGET = 64
MOST_OPERATIONS = {"keydiff": 6, "h2o-ema": 6, "h2o": 9, "8 bits h2o": 14.5, "ragged h2o": 9.1}
MOST_OPERATIONS |= {"mixed keydiff": 21.5, "mixed h2o-ema": 29.1, "groups h2o": 24.5}
MOST_FILES, MOST_RETURNS, MOST_CALLS = 4, 1, 30

pytestmark = NATIVE


def fed(tokens: int, **settings: Any) -> H2OKVCache:
    config = H2OConfig.of(max_kv_size=BUDGET, **settings)
    cache = (QuantizedH2OKVCache if config.kv_bits else H2OKVCache)(config)
    for count in (tokens - 1, 1):  # what comes next finds room
        queries, rows = (mx.zeros((1, heads, count, 64)) for heads in (4, 2))
        cache.attend(queries, *cache.update_and_fetch(rows, rows), scale=0.1, mask="causal")
    return cache


def holds(value: object, keys: mx.array) -> bool:
    """Whether it is the key, or has it in it."""
    if isinstance(value, list | tuple):
        return any(holds(one, keys) for one in value)
    return value is keys


def path_of(cache: H2OKVCache, keys: mx.array) -> list[str]:
    """The files whose functions are given the key, in order, up to the operation that stores it."""
    found: list[str] = []

    def see(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event != "call" or "mlx_h2o" not in name or found[-1:] == ["stored"]:
            return
        given = [frame.f_locals.get(one) for one in frame.f_code.co_varnames]
        if any(holds(value, keys) for value in given) and found[-1:] != [name]:
            found.append(name)

    def storing(stock: Any) -> Any:
        def stored(*given: Any) -> list[mx.array]:
            found.append("stored")
            return stock(*given)

        return stored

    # The extension's own functions store the key, which no profile of Python sees.
    operations = resolve()
    stores = {name: storing(getattr(operations, name)) for name in ("append_rows", "put_each")}
    with mock.patch.multiple(operations, **stores):
        sys.setprofile(see)
        try:
            cache.update_and_fetch(keys, keys)
        finally:
            sys.setprofile(None)
    assert found.pop() == "stored", "the cache stored the key in a way that this test cannot see"
    return found


def is_short(path: list[str]) -> bool:
    """Whether it passes few files, and seldom comes back to one that it has left."""
    returns = sum(name in path[:place] for place, name in enumerate(path))
    return len(set(path)) <= MOST_FILES and returns <= MOST_RETURNS


def calls_of_steps(cache: H2OKVCache, sequences: int, tokens: int, taken_back: int) -> int:
    """Of our functions in the last of some steps, from the mask to the rows for attention."""
    calls, (queries, rows) = 0, (mx.zeros((sequences, heads, tokens, 64)) for heads in (4, 2))

    def count_one(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and "mlx_h2o" in frame.f_code.co_filename

    with mlx_h2o.use_backend("native"):
        for _ in range(5):
            calls = 0
            sys.setprofile(count_one)
            mask = cache.make_mask(tokens)
            found = cache.update_and_fetch(rows, rows)
            sys.setprofile(None)
            cache.attend(queries, *found, scale=0.1, mask=mask)
            cache.trim(taken_back)
    return calls


# Settings, the tokens that each sequence has seen, and the most calls of a step.
STEPS: dict[str, tuple[dict[str, Any], list[int], int]] = {
    "one sequence": ({}, [9], 20),
    "packed": ({"kv_bits": 8}, [9], 20),
    "drafts": ({"speculative": 3}, [9], MOST_CALLS),
    "unlike lengths": ({}, [3, 9, 5], MOST_CALLS),
    "unlike lengths, packed": ({"kv_bits": 8}, [3, 9, 5], MOST_CALLS),
    "shared": ({"prefix_size": 8}, [9], MOST_CALLS),
    "a row goes": ({"evict_every": 1}, [BUDGET], 200),  # with h2o it is folded
    "a row goes, packed": ({"evict_every": 1, "kv_bits": 8}, [BUDGET], 220),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("policy", ["keydiff", "h2o", "h2o-ema"])
def test_a_step_is_a_short_walk(policy, step):
    settings, seen, most = STEPS[step]
    caches = [fed(count, policy=policy, **settings) for count in seen]
    if caches[0].config.prefix_size:
        caches[0].share(8)
    cache = caches[0] if len(seen) == 1 else H2OKVCache.merge(caches)
    tokens, taken_back = (4, 2) if cache.config.speculative else (1, 0)
    assert 0 < calls_of_steps(cache, len(seen), tokens, taken_back) <= most
    with mlx_h2o.use_backend("native"):
        path = path_of(cache, mx.ones((len(seen), 2, tokens, 64)))
    assert is_short(path), path


@pytest.mark.parametrize("arm", MOST_OPERATIONS)
def test_a_step_makes_few_operations(arm):
    with script("host_time") as benchmark, mlx_h2o.use_backend("native"):
        assert 0 < benchmark.Arm(arm, 64).calls(64) <= MOST_OPERATIONS[arm]


def test_a_detour_would_be_seen():
    class Detour(H2OKVCache):
        def update_and_fetch(self, keys, values):
            for _ in range(MOST_RETURNS + 1):
                mlx_h2o.fast.key_diversity(keys)
            return super().update_and_fetch(keys, values)

    cache = Detour(H2OConfig.of(max_kv_size=BUDGET, policy="keydiff"))
    rows = mx.ones((1, 2, 1, 64), mx.float16)
    for _ in range(3):
        cache.update_and_fetch(rows, rows)
    with mlx_h2o.use_backend("native"):
        path = path_of(cache, rows)
    assert not is_short(path), path
    others = [f"{place}.py" for place in range(MOST_FILES + 1)]
    assert is_short(others[1:]) and not is_short(others)
