"""What caches lose on a real model matches benchmarks/results/real_check.json."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest

from benchmark_scripts import script
from fetched_models import loaded
from mlx_h2o import make_prompt_cache, routing
from mlx_h2o.evaluation.reading import forced
from mlx_h2o.lm import layers

WRONG = {"window": {"policy": "window"}, "3 bits": {"kv_bits": 3}}
"""Settings beside --max-kv-bytes that must show."""


@pytest.fixture(scope="module")
def check() -> Iterator[ModuleType]:
    with script("real_check") as module:
        yield module


@pytest.fixture(scope="module")
def committed(check: ModuleType) -> dict[str, float]:
    return json.loads(check.COMMITTED.read_text())["losses"]


@pytest.mark.real
def test_losses_are_as_committed_and_what_is_wrong_shows(
    check: ModuleType, committed: dict[str, float]
) -> None:
    """In one reading, which takes little longer than that of one cache."""
    model, tokenizer = loaded(check.MODEL)
    found = check.losses(model, check.passages(tokenizer), **WRONG)
    wrong = {name: found.pop(name) for name in WRONG}
    assert found.keys() == {name for name in committed if not name.startswith("recall")}
    assert check.beyond(found, committed) == []
    for name, loss in wrong.items():
        assert check.beyond(committed | {"eighth": loss}, committed), name


@pytest.mark.real
def test_rows_for_the_wrong_heads_show(
    check: ModuleType, committed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded(check.MODEL)
    found = layers.probe(model)
    wrong = replace(found, gives=found.gives[::-1])
    eighth = partial(check.bounded, model, check.PARTS["eighth"])
    share = check.recalled(model, tokenizer, eighth)
    assert check.beyond(committed | {"recall, eighth": share}, committed) == []
    monkeypatch.setattr(layers, "probe", lambda model: wrong)
    share = check.recalled(model, tokenizer, eighth)
    assert check.beyond(committed | {"recall, eighth": share}, committed)


@pytest.mark.real
def test_few_bits_hardly_change_predictions_where_nothing_is_evicted(check: ModuleType) -> None:
    """By default: .0010 and .0027; .0066 and .0114 if the newest rows are quantised too."""
    model, tokenizer = loaded(check.MODEL)
    read = partial(forced, model, tokens=check.passages(tokenizer)[:, :208], first=128)
    with routing(model):
        full = read(make_prompt_cache(model, None), keep=True)
        for bits, most in ((8, 0.003), (5, 0.006)):
            few = read(make_prompt_cache(model, None, kv_bits=bits, v_bits=4), reference=full)
            assert few.divergences is not None and few.divergences.mean().item() < most


def test_a_difference_is_named(check: ModuleType) -> None:
    expected = {"full": 2.0, "quarter": 2.1}
    assert check.beyond({"full": 2.005, "quarter": 2.105}, expected) == []
    # What a cache loses is above the full cache's own loss.
    assert check.beyond({"full": 2.009, "quarter": 2.115}, expected) == []
    for found in ({"full": 2.0, "quarter": 2.12}, {"full": 2.0, "quarter": 2.0}):
        (said,) = check.beyond(found, expected)
        assert said.startswith("quarter: ")
    assert len(check.beyond({"full": 2.1, "quarter": 2.2}, expected)) == 1
