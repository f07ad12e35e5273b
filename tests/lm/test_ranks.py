"""Several processes that share a model give the results of a single one, and end together."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from fetched_models import fetched
from mlx_h2o.lm.ranks import ALONE, Ranks, ranks_of
from rank_processes import LIBRARY, ended, pausing, saved, started
from ranks_program import HEADS, MODELS, SETTINGS
from tiny_models import tiny_qwen3

__all__ = ["pausing", "saved"]


def made(count: int, folder: Path, environment: dict[str, str], *model: str) -> list[Any]:
    """What each of this many processes makes."""
    program = str(LIBRARY / "ranks_program.py"), str(folder / "{rank}.json"), *model
    said = ended(processes := started(count, folder, environment, *program))
    assert [one.returncode for one in processes] == [0] * count, said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return made(1, tmp_path_factory.mktemp("alone"), {})[0]


@pytest.fixture(scope="module", params=[2, 4])
def together(
    request: pytest.FixtureRequest, pausing: dict[str, str], tmp_path_factory: Any
) -> list[Any]:
    """What each of two, and of four processes makes."""
    return made(request.param, tmp_path_factory.mktemp("together"), pausing)


CASES = [
    *((model, settings) for model in MODELS for settings in (*SETTINGS, "batch", "bytes")),
    ("by head", "h2o"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "settings"), CASES)
def test_several_processes_make_what_one_makes(
    alone: Any, together: list[Any], model: str, settings: str
) -> None:
    one = alone[model][settings]
    for found in together:
        for name, value in one.items():
            assert name == "kept" or found[model][settings][name] == value
    for layer, heads in enumerate(one.get("kept", ())):
        own = [found[model][settings]["kept"][layer] for found in together]
        assert [head for heads in own for head in heads] == heads


@pytest.mark.slow
def test_all_take_the_tokens_of_the_first(alone: Any, together: list[Any]) -> None:
    assert all(found["agreed"] == alone["agreed"] for found in together)


@pytest.mark.slow
def test_the_probe_sees_the_heads_of_all_processes(alone: Any, together: list[Any]) -> None:
    for found in together:
        for name, value in alone["probe"].items():
            for own, expected in zip(found["probe"][name], value, strict=True):
                assert own == pytest.approx(expected, abs=2e-4)
    rows = {len(head) for layer in alone["by head"]["h2o"]["kept"] for head in layer}
    assert len(rows) > 1


def generating(model: str, *more: str) -> list[str]:
    command = ["-m", "mlx_h2o", "generate", "--model", model, "--prompt", "t3 t1 t4", *more]
    return [*command, "--max-kv-size", "40"]


@pytest.mark.slow
def test_a_command_speaks_once(saved: str, tmp_path: Path, pausing: dict[str, str]) -> None:
    command = generating(saved, "--max-tokens", "8", "--temp", "1")
    first, second = ended(started(2, tmp_path, pausing, *command))
    assert "Generation: 8 tokens" in first[0]
    assert "bytes, in each of 2 processes" in first[0]
    assert second == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "said"), [
    ("generate --draft-model demo", "--draft-model is for one process, found 2"),
    ("benchmark", "mlx_h2o benchmark is for one process, found 2"),
])  # fmt: skip
def test_what_is_not_for_several_processes_is_refused(
    saved: str, tmp_path: Path, pausing: dict[str, str], command: str, said: str
) -> None:
    line = "-m", "mlx_h2o", *command.split(), "--model", saved
    processes = started(2, tmp_path, pausing, *line)
    for _, error in ended(processes):
        assert said in error
    assert [one.returncode for one in processes] == [2, 2]


@pytest.mark.real
def test_three_processes_write_what_smollm2_writes_in_one(
    tmp_path: Path, pausing: dict[str, str]
) -> None:
    """It has 9 query heads and 3 KV heads."""
    model = fetched("smollm2-135m-instruct")
    found = made(3, tmp_path, pausing, model)
    (expected,) = made(1, tmp_path, {}, model)
    assert found == [expected] * 3
    assert len({tuple(one) for one in expected.values()}) > 1


def test_own_heads_are_a_part_of_all() -> None:
    ranks = Ranks(4, 2)
    assert ranks.own([*range(8)]) == [4, 5]
    with pytest.raises(ValueError, match="found 6 KV heads"):
        ranks.own([*range(6)])
    assert str(ranks) == ", in each of 4 processes"


def test_a_model_that_is_whole_has_one_process() -> None:
    model = tiny_qwen3(**HEADS)
    assert ranks_of(model) is ALONE
    model.shard(mx.distributed.init())
    assert ranks_of(model) is ALONE
    assert ALONE.told({"a": 1}) == {"a": 1} and ALONE.least(3, 2**70) == [3, 2**70]
    assert str(ALONE) == ""
