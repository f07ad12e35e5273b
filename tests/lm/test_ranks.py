"""Several processes that share a model give the results of a single one, and end together."""

import json
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from fetched_models import fetched
from mlx_h2o.lm.ranks import ALONE, Ranks, ranks_of
from rank_processes import LIBRARY, ended, pausing, saved, started
from ranks_program import MODELS, PIPELINE, SETTINGS, tiny_qwen2

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


@pytest.mark.slow
@pytest.mark.parametrize("settings", [*SETTINGS, "batch", "bytes", "agreed", "by head"])
@pytest.mark.parametrize("model", MODELS)
def test_several_processes_make_what_one_makes(
    alone: Any, together: list[Any], model: str, settings: str
) -> None:
    one, every = alone[model][settings], [found[model][settings] for found in together]
    assert [found | {"kept": None} for found in every] == [one | {"kept": None}] * len(every)
    kept = [found.get("kept", []) for found in every]  # of each KV head of each layer
    if model == PIPELINE:  # the first process has the last layers
        assert [*chain(*reversed(kept))] == one.get("kept", [])
    else:
        assert [[*chain(*heads)] for heads in zip(*kept, strict=True)] == one.get("kept", [])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_probe_sees_every_part(alone: Any, together: list[Any], model: str) -> None:
    """Also if one process has to probe again, and the others have the result in a file."""
    one = alone[model]["probe"]
    for found, probe, name in product(together, ("probe", "probed again"), ("gives", "errors")):
        np.testing.assert_allclose(found[model][probe][name], one[name], rtol=0, atol=2e-4)
    rows = {len(head) for layer in alone[model]["by head"]["kept"] for head in layer}
    assert len(rows) > 1


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--pipeline"]], ids=str)
def test_a_command_speaks_once(saved, tmp_path, pausing, flags):
    layers, which = (2, "the first") if flags else (3, "each")
    command = ["-m", "mlx_h2o", "generate", "--model", saved, "--prompt", "314", *flags]
    command += ["--max-tokens", "8", "--temp", "1", "--max-kv-size", "40"]
    first, second = ended(started(2, tmp_path, pausing, *command))
    assert "Generation: 8 tokens" in first[0]
    assert f"{layers} of {layers} layers evict" in first[0]
    assert f"bytes, in {which} of 2 processes" in first[0]
    assert second == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "said"), [
    ("generate --draft-model demo", "--draft-model is for one process, found 2"),
    ("benchmark", "mlx_h2o benchmark is for one process, found 2"),
])  # fmt: skip
def test_what_is_not_for_several_processes_is_refused(saved, tmp_path, pausing, command, said):
    processes = started(2, tmp_path, pausing, "-m", "mlx_h2o", *command.split(), "--model", saved)
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


def test_a_model_has_one_process_or_is_split_one_way(saved: str) -> None:
    model = tiny_qwen2()
    assert ranks_of(model) is ALONE
    model.shard(mx.distributed.init())
    assert ranks_of(model) is ALONE
    assert ALONE.told({"a": 1}) == {"a": 1} and ALONE.least(3, 2**70) == [3, 2**70]
    assert str(ALONE) == ""
    model, group = tiny_qwen2(), SimpleNamespace(size=lambda: 4, rank=lambda: 0)
    model.shard(group)
    model.model.pipeline_size = 4
    with pytest.raises(ValueError, match="by heads and by layers"):
        ranks_of(model)
    for name, said in (("demo", "not support pipelining"), (saved, "must .* sum to 3 layers")):
        with pytest.raises(ValueError, match=said):
            mlx_h2o.load(name, group=group, pipeline=True)
