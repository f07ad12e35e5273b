"""After each chunk of a prompt, caches hold no more bytes than when they are full."""

from typing import Any

import mlx.core as mx
import pytest

import mlx_h2o
from cache_columns import COLUMNS, SIZE
from mlx_h2o import fit_bytes, policies
from mlx_h2o.lm.routing import evicting_caches
from tiny_models import random_prompt, tiny_qwen3

ROWS = 40
SETTINGS = {"max_kv_size": ROWS, "sink_size": 2, "recent_size": 8}
CHUNKS = (30, 30, 7, 64, 1, 20, 2)
"""The first stays below the budget, of which mixed precision packs some all the same."""
HEADS = {"budgets": [[24, ROWS], [ROWS, 24]], "recent_size": None}
MODES: dict[str, dict[str, Any]] = {
    "drafts": {"speculative": 2, "policy": "h2o-ema"},
    "drafts, mixed": {"speculative": 2, "policy": "h2o-ema"} | COLUMNS["8 and 4"].settings,
    "one by one": {"evict_every": 1, "policy": "h2o"},
    "short context": {"context_size": 50, "policy": "h2o", "kv_bits": 4, "kv_group_size": 32},
    "heads": HEADS | {"policy": "h2o"},
    "heads, packed": HEADS | {"kv_bits": 8, "kv_group_size": 32},
}
BOTH = [
    pytest.param(COLUMNS[column].settings | {"policy": policy}, id=f"{column}, {policy}")
    for column in COLUMNS
    if not COLUMNS[column].latents  # which this model has not
    for policy in policies.names()
]
MODE = [pytest.param(settings, id=name) for name, settings in MODES.items()]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_qwen3(head_dim=SIZE)


def caches_of(model: Any, settings: dict[str, Any]) -> list[Any]:
    return mlx_h2o.make_prompt_cache(model, **SETTINGS | settings)


def read(model: Any, caches: list[Any], tokens: list[int]) -> mx.array:
    logits = model(mx.array(tokens)[None], cache=caches)
    mx.eval(logits)
    return logits


def nbytes(caches: list[Any]) -> int:
    return sum(cache.nbytes for cache in caches)


def full(model: Any, settings: dict[str, Any]) -> int:
    """The most bytes behind a prompt of one token more than there are rows, and in steps."""
    caches, most = caches_of(model, settings), 0
    with mlx_h2o.routing(model):
        for length in (ROWS + 1, *[1] * 8):
            model(mx.array([random_prompt(length)]), cache=caches)
            most = max(most, nbytes(caches))
    return most


@pytest.mark.matrix(6)
@pytest.mark.parametrize("settings", [*MODE, *BOTH])
def test_bytes_stay_below_those_of_full_caches(model, settings):
    limit, caches = full(model, settings), caches_of(model, settings)
    with mlx_h2o.routing(model):
        for length in CHUNKS:
            read(model, caches, random_prompt(length))
            mx.eval([cache.state for cache in caches])  # as mlx_lm does
            assert sum(one.held_nbytes for one in evicting_caches(caches)) <= limit, length
            assert nbytes(caches) <= limit
            assert max(cache.size() for cache in caches) <= ROWS


@pytest.mark.parametrize("name", ["dense", "8 bits", "8 and 4"])
def test_padding_leaves_no_room_behind(model, name):
    """A batch whose fuller sequence gets padding: none is beyond its budget."""
    settings = COLUMNS[name].settings | {"policy": "h2o-ema"}
    limit, alone = full(model, settings), [caches_of(model, settings) for _ in range(2)]
    with mlx_h2o.routing(model):
        for caches, length in zip(alone, (5, ROWS - 4), strict=True):
            read(model, caches, random_prompt(length))
        batch = [type(layer[0]).merge(layer) for layer in zip(*alone, strict=True)]
        for cache in batch:
            cache.prepare(lengths=[20, 2], right_padding=[0, 18])
        mx.eval(model(mx.array([random_prompt(20)] * 2), cache=batch))
        assert [cache.evicted for cache in batch] == [0, 0]
        assert nbytes(batch) <= 2 * limit


def test_a_budget_in_bytes_is_kept_while_a_prompt_is_read(model):
    limit = 60_000
    sizing = fit_bytes(model, limit, kv_group_size=SIZE)
    caches = mlx_h2o.make_prompt_cache(model, max_kv_bytes=limit, kv_group_size=SIZE)
    ours = list(evicting_caches(caches))
    with mlx_h2o.routing(model):
        for _ in range(3):
            read(model, caches, random_prompt(512))
            assert limit < sum(cache.held_nbytes for cache in ours) <= sizing.peak_nbytes
            assert nbytes(caches) <= sizing.nbytes <= limit
