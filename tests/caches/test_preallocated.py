"""Slots allocated ahead: the same rows, no further allocations, and pages are given back."""

import copy
import resource
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from back_ends import BACKENDS, NATIVE
from cache_checks import SHAPE, address, random_tokens
from cache_invariants import check_same_rows
from mlx_h2o import H2OConfig, H2OKVCache
from mlx_h2o.caches.cache import evicting_cache
from mlx_h2o.operations.backends import resolve, use_backend

HEADS, SIZE = SHAPE["heads"], 64
COLUMNS: dict[str, dict[str, Any]] = {
    "dense": {},
    "8": {"kv_bits": 8, "policy": "h2o-ema"},
    "turbo3": {"kv_format": "turbo3"},
    "h2o": {"kv_bits": 4, "policy": "h2o"},
}
PAGE = resource.getpagesize()


@pytest.fixture
def by_pages() -> None:
    if "native" not in BACKENDS:
        pytest.skip("needs the native back end")
    with use_backend("native"):
        if not resolve().commits_pages():
            pytest.skip("this system does not take and give back memory by pages")


def rows(count: int, seed: int = 0, batch: int = 1) -> tuple[mx.array, mx.array, mx.array]:
    drawn = random_tokens(np.random.default_rng(seed), count, SIZE, batch)
    return tuple(map(mx.array, drawn))


def step(cache: Any, seed: int, count: int = 1, batch: int = 1) -> mx.array:
    q, k, v = rows(count, seed, batch)
    mask = cache.make_mask(count)
    out = cache.attend(q, *cache.update_and_fetch(k, v), scale=SIZE**-0.5, mask=mask)
    mx.eval(out)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", COLUMNS)
def test_the_rows_are_those_of_a_cache_that_grows(kind: str, backend: str) -> None:
    """Copies that go on, a prompt beyond the budget, evictions, drafts that go back."""
    config = {"max_kv_size": 48, "speculative": 2, **COLUMNS[kind]}
    with use_backend(backend):
        plain, ahead = pair(config)
        for seed, count in enumerate([20, 1, 27, 1, 60, 1, 3, 1, 1, 3, 1]):
            assert mx.array_equal(step(plain, seed, count), step(ahead, seed, count)).item()
            if seed in (1, 2):
                plain, ahead = copy.deepcopy(plain), copy.deepcopy(ahead)
            if count == 3:
                assert plain.trim(2) == ahead.trim(2) == 2
        check_same_rows(plain, ahead)


def pair(config: dict[str, Any]) -> list[Any]:
    """A cache whose room grows, and one whose room is made at once."""
    return [evicting_cache(H2OConfig.of(**config, preallocate=ahead)) for ahead in (False, True)]


@NATIVE
@pytest.mark.parametrize("rows", [16, None])
def test_restored_rows_join_those_with_room(rows: int | None) -> None:
    """Files do not keep the setting."""
    ahead = evicting_cache(H2OConfig.of(max_kv_size=rows, preallocate=40))
    for seed in range(20):
        step(ahead, seed)
    restored = type(ahead).from_state(ahead.state)
    for pair in ([ahead, restored], [restored, ahead]):
        batch = H2OKVCache.merge(pair)
        batch.extend(H2OKVCache.merge(pair[::-1]))
        step(batch, 20, batch=4)
        assert batch.positions is not None and mx.array_equal(*batch.positions[:2]).item()


@pytest.mark.parametrize("bits", [None, 4])
def test_folding_writes_in_place(bits: int | None) -> None:
    cache = evicting_cache(H2OConfig.of(max_kv_size=64, policy="h2o", kv_bits=bits))
    places = set()
    for seed in range(72):
        step(cache, seed)
        if seed > 64:
            tail = cache._table.tail  # a list of the arrays would hold them until the next step
            places.add(tuple(address(part) for part in tail.parts))
    assert len(places) == 1


def test_memory_is_taken_as_rows_come_and_given_back(by_pages: None) -> None:
    """Of 32 MB that are reserved: what rows have come, and after trimming what rows are left."""
    cache = H2OKVCache(H2OConfig.of(max_kv_size=None, policy="window", preallocate=32768))
    sides = 2 * HEADS
    for count in (1000, 3000, 20_000):
        append(cache, count)
        held_for(cache, cache.offset)
        taken = cache.offset * sides * SIZE * 4
        assert taken <= cache.nbytes <= taken + 2 * PAGE * sides
    assert cache._table.tail.parts[0].shape[2] >= 32768
    assert cache.trim(23_900) == 23_900
    held_for(cache, 100)
    before = cache.keys
    step(cache, 1)
    assert mx.array_equal(cache.keys[:, :, :100], before).item()


def test_the_process_gives_back_what_leaves_a_window(by_pages: None) -> None:
    """A prompt of 24,000 tokens in one chunk, 1,000 stay; at the second eviction or flush."""
    cache = H2OKVCache(H2OConfig.of(max_kv_size=1000, policy="window", preallocate=32768))
    append(cache, 24_000)
    held_for(cache, 24_000)
    for _ in range(64):
        append(cache, 1)
    assert 900 < cache.size() <= 1000
    held_for(cache, cache.size())
    append(cache, 24_000)
    for _ in range(2):
        cache.flush()
        mx.eval(cache._table.tail.parts)
        mx.synchronize()
    held_for(cache, 1000)


def append(cache: Any, count: int) -> None:
    _, k, v = rows(count)
    mx.eval(cache.update_and_fetch(k, v))
    mx.synchronize()  # MLX's thread lets go of what it has read a moment later


def held_for(cache: Any, count: int) -> None:
    """The system has given memory for this many rows, and little more."""
    for part in cache._table.tail.parts:
        first, least = address(part) // PAGE, count * HEADS * SIZE * 4
        with Path("/proc/self/pagemap").open("rb") as pages:
            pages.seek(8 * first)
            found = np.frombuffer(pages.read(8 * -(-part.nbytes // PAGE + 1)), np.uint64)
        held = np.count_nonzero(found >> np.uint64(62)) * PAGE  # in memory, or in swap
        assert least <= held <= least + 4 * PAGE, (held, least)


def test_what_somebody_holds_is_not_given_back(by_pages: None) -> None:
    cache = H2OKVCache(H2OConfig.of(max_kv_size=None, policy="window", preallocate=8192))
    _, k, v = rows(4000)
    keys, _ = cache.update_and_fetch(k, v)
    mx.eval(keys)
    assert cache.trim(3900) == 3900
    assert mx.array_equal(keys, k).item()
    del keys
    assert cache._table.tail.nbytes < 2 * (k.nbytes + v.nbytes)
