"""Memory that runs out in the middle of a step: the cache refuses to continue, or is right."""

import copy
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cache_checks import SHAPE, random_tokens
from cache_columns import COLUMNS, SIZE, new_cache
from cache_invariants import check_same, seen_from_outside
from failing import failing
from mlx_h2o import H2OConfig, H2OKVCache, load_prompt_cache, save_prompt_cache

pytestmark = pytest.mark.examples

APART = 7 if os.environ.get("MLX_H2O_EXHAUSTIVE") else 41
"""One operation in this many is made to fail."""

SMALL = {"max_kv_size": 14, "sink_size": 2, "recent_size": 5, "evict_every": 4}
KINDS = [
    ("dense", "h2o-ema"), ("dense", "keydiff"), ("dense", "h2o"), ("8 bits", "tova"),
    ("8 and 4", "keydiff"), ("turbo3", "window"), ("K8 V4", "h2o"), ("arrays", "h2o-sum"),
]  # fmt: skip
BEFORE: dict[str, list[int]] = {"few rows": [5, 1], "full": [5, 20, 1, 1], "surplus": [5, 20]}


def update(cache: Any, count: int, seed: int) -> Callable[[], np.ndarray]:
    """The rows come; what is returned attends to them."""
    rng, batch = np.random.default_rng([seed, count]), np.array(cache.offset).size
    queries, keys, values = map(mx.array, random_tokens(rng, count, SIZE, batch))
    mask = cache.make_mask(count)
    found = cache.update_and_fetch(keys, values)
    return lambda: np.array(cache.attend(queries, *found, scale=0.25, mask=mask))


def alone(column: str, policy: str, before: str, **settings: Any) -> Any:
    given = SMALL | COLUMNS[column].settings | {"policy": policy}
    cache = new_cache(H2OConfig.of(**given | settings))
    for seed, count in enumerate(BEFORE[before]):
        update(cache, count, seed)()
    return cache


def together(column: str, policy: str, before: str) -> Any:
    """Two sequences, one of which is further on."""
    batch = H2OKVCache.merge([alone(column, policy, one) for one in ("few rows", before)])
    update(batch, 1, 9)()
    return batch


def taken_up(cache: Any, out: Callable[[], np.ndarray]) -> list[Any]:
    return [out(), *went_on(cache)]


def went_on(cache: Any, _: Any = None) -> list[Any]:
    """What the cache says from now on."""
    found = []
    for turn, count in enumerate((1, 3, 1, 1)):
        found += [update(cache, count, 50 + turn)(), seen_from_outside(cache)]
    return found


def both_went_on(cache: Any, other: Any) -> list[Any]:
    return [*went_on(other), *went_on(cache)]


def written(cache: Any) -> Any:
    """To a file that is there once; what is read of it says which."""
    folder = tempfile.TemporaryDirectory()
    save_prompt_cache(Path(folder.name) / "cache", [cache])
    return folder


def read(cache: Any, folder: Any) -> list[Any]:
    with folder:
        assert [file.name for file in Path(folder.name).iterdir()] == ["cache.safetensors"]
        (found,) = load_prompt_cache(Path(folder.name) / "cache")
        return both_went_on(cache, found)


def merged(batch: Any) -> Any:
    return H2OKVCache.merge([batch.extract(n) for n in (1, 0)])


Event = Callable[[Any], Any]
After = Callable[[Any, Any], list[Any]]

TOKEN, CHUNK = (partial(update, count=count, seed=7) for count in (1, 6))
EVENTS: dict[str, tuple[Callable[..., Any], Event, After]] = {
    "token": (alone, TOKEN, taken_up),
    "chunk": (alone, CHUNK, taken_up),
    "flush": (alone, lambda cache: cache.flush(), went_on),
    "copy": (alone, copy.deepcopy, both_went_on),
    "save": (alone, written, read),
    "token of a batch": (together, TOKEN, taken_up),
    "chunk of a batch": (together, CHUNK, taken_up),
    "extract": (together, lambda cache: cache.extract(1), both_went_on),
    "merge": (together, merged, both_went_on),
    "filter": (together, lambda cache: cache.filter([1]), went_on),
    "extend": (together, lambda cache: cache.extend(copy.deepcopy(cache)), went_on),
}


def assert_loud_or_right(make: Callable[[], Any], event: Event, after: After) -> int:
    """Each operation of the event fails once, and then the event is tried again; returns how many
    there are."""
    whole = make()
    expected = after(whole, event(whole))
    for number in range(0, 100_000, APART):
        cache, raised = make(), False
        with failing(number) as fault:
            try:
                result = event(cache)
            except MemoryError:
                raised = True  # or not, where an object that goes is the one that fails
        if not fault.struck:
            return number
        try:
            found = after(cache, event(cache) if raised else result)
        except (RuntimeError, ValueError) as error:
            if not str(error).startswith("["):
                raise AssertionError(f"after {fault.struck}") from error
            continue
        for one, other in zip(found, expected, strict=True):
            if isinstance(other, dict):
                check_same(one, other)
            else:
                np.testing.assert_array_equal(one, other, err_msg=f"after {fault.struck}")
    raise AssertionError("no end of operations")


@pytest.mark.matrix(12)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize(("column", "policy"), KINDS)
def test_a_step_that_fails(column, policy, before, event):
    """Caches of one sequence, and of a batch."""
    make, *tried = EVENTS[event]
    assert_loud_or_right(partial(make, column, policy, before), *tried)


@pytest.mark.parametrize("policy", ["keydiff", "snapkv"])
def test_drafts_that_fail_to_go(policy):
    make = partial(alone, "dense", policy, "full", speculative=2)
    assert_loud_or_right(make, lambda cache: cache.trim(2), went_on)


def test_a_prefix_that_fails_to_be_shared():
    make = partial(alone, "dense", "h2o-ema", "full", prefix_size=4)
    assert_loud_or_right(make, lambda cache: cache.share(4), went_on)


def test_what_an_interrupted_cache_says():
    """Whatever it is asked, and to everybody."""
    cache = alone("dense", "h2o-ema", "few rows")
    shape = (1, SHAPE["heads"], 1, SIZE)
    with failing(30) as fault, pytest.raises(MemoryError):
        cache.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
    said = r"^\[H2OKVCache\] the cache of tiny layer 0 was interrupted .* make a new cache\.$"
    asked = (
        H2OKVCache.size, copy.deepcopy, lambda one: one.state, lambda one: one.trim(1),
        lambda one: one.keys_and_values(), lambda one: H2OKVCache.merge([one]), went_on,
    )  # fmt: skip
    for ask in asked:
        with pytest.raises(RuntimeError, match=said):
            ask(cache)
    assert fault.struck
