"""The embedded model, its text and its facts, and the demo from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_h2o
from mlx_h2o import demo, evaluate
from mlx_h2o.demo import __main__ as command
from mlx_h2o.demo import report
from mlx_h2o.demo.__main__ import main
from mlx_h2o.demo.measure import ArmResult, Settings
from mlx_h2o.evaluation.facts import PlantedText, plant


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    model, tokenizer = mlx_h2o.load("demo")
    return model, tokenizer


def test_the_model_directory_is_complete_and_says_its_licence() -> None:
    names = {path.name for path in demo.model_path().iterdir()}
    assert {
        "LICENSE",
        "MODEL_CARD.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    weights = mx.load(str(demo.model_path() / "model.safetensors"))
    assert {weight.dtype for weight in weights.values()} == {mx.float16}
    assert "MIT" in (demo.model_path() / "LICENSE").read_text()


@pytest.mark.parametrize("seed", range(3))
def test_planting_keeps_the_text_and_inserts_whole_facts(
    loaded: tuple[Any, Any], seed: int
) -> None:
    tokenizer = loaded[1]
    text = plant(tokenizer, demo.text(), length=500, facts=6, seed=seed)
    assert len(text.tokens) == 500
    assert text.last_fact <= 0.4 * 500
    written = tokenizer.decode(list(text.tokens))
    without = written
    for fact, question in zip(text.facts, text.questions, strict=True):
        assert written.count(f"\n{fact}\n") == 1
        assert len(question.answer) == 4
        without = without.replace(f"\n{fact}\n", "")
    assert demo.text().startswith(without)


def test_planting_says_what_does_not_fit(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"^\[plant\] the text has .* tokens beside the facts"):
        plant(loaded[1], "too short", length=400)
    with pytest.raises(ValueError, match=r"^\[plant\] 30 facts do not fit"):
        plant(loaded[1], demo.text(), length=400, facts=30)


@pytest.mark.exhaustive
def test_the_demo_runs_quietly_and_writes_what_it_shows(tmp_path: Path) -> None:
    result = tmp_path / "demo.json"
    sizes = ["--length", "60", "--max-kv-bytes", "30KB", "--facts", "2", "--generate", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "mlx_h2o.demo", *sizes, "--json", str(result)],
        capture_output=True,
        text=True,
        check=True,
    )
    written = json.loads(result.read_text())
    arms = {arm["name"]: arm for arm in written["arms"]}
    whole = ["full cache", "full 4 bits"]
    assert list(arms) == [*whole, "rotating", "keydiff 4 bits", "ours"]
    full, packed = (arms.pop(name) for name in whole)
    assert (full["evicted_rows_per_layer"], full["top1_agreement"]) == (0, 1.0)
    assert full["kv_bytes"] == 60 * 6 * 2 * 2 * 64 * 2  # 6 layers of 2 heads, 64 elements
    assert packed["kv_bytes"] == full["kv_bytes"] * 4.5 / 16  # two numbers of 16 bits for each 64
    for arm in arms.values():
        # Layers with more rows than the text has tokens leave some of the bytes.
        assert 20_000 < arm["kv_bytes"] <= 30_000
        assert arm["evicted_rows_per_layer"] > 0
        assert f"{arm['perplexity']:.2f}" in done.stdout
        assert arm["generated"]
    # From the first token on that a cache has evicted before: 9 of the window's float16 rows.
    assert written["settings"]["predicted_from"] == 30_000 // (full["kv_bytes"] // 60)
    assert "\x1b" not in done.stdout
    assert done.stdout.startswith("60 tokens, demo")


@pytest.mark.parametrize("longest", [0.0, 1000.0])
def test_a_model_that_takes_too_long_is_not_shown(
    longest: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "LONGEST_STEP", longest)
    folder = str(demo.model_path())
    name, model, _ = command.load(folder)
    assert name == ("model" if longest else "demo")
    assert ("takes" in capsys.readouterr().err) is not bool(longest)
    assert len(model.layers) == 6


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "no/such/folder"],
        ["--max-kv-bytes", "9GB"],
        ["--max-kv-bytes", "400"],
        ["--max-kv-bytes", "much"],
        ["--facts", "0"],
        ["--length", "5000"],
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert "error" in capsys.readouterr().err


def arm(name: str, recalled: tuple[bool, ...]) -> ArmResult:
    forced = evaluate.TeacherForced(first=8, losses=(1.0, 2.0), top1=(3, 4))
    return ArmResult(name, "text", 10, 20, 30, 0, recalled, forced)


@pytest.mark.parametrize(("known", "shown"), [(4, True), (3, False)])
def test_recall_is_left_out_where_the_full_cache_itself_fails(known: int, shown: bool) -> None:
    full = arm("full cache", tuple(number < known for number in range(5)))
    results = [full, arm("rotating", (False,) * 5)]
    text = PlantedText(tokens=(1,) * 10, questions=(), facts=(), last_fact=0)
    speeds = {"full cache": (1.0, 2.0, 9.0), "rotating": (3.0,)}
    columns = report.table(results, speeds, text, Settings("demo", first=8)).columns
    labels = list(columns[0].cells)
    speed = labels.index("tokens/s")
    assert list(columns[1].cells)[speed] == "2"
    assert ("facts recalled" in labels) is shown
    assert any("left out" in note for note in report.footnotes(results)) is not shown
    assert (
        report.as_json(results, speeds, text, Settings("demo", first=8))["recall_counts"] is shown
    )
