"""The embedded model, and the demo from end to end."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_h2o import demo
from mlx_h2o.cli import ended
from mlx_h2o.demo import __main__ as command


def test_the_model_directory_is_complete_and_says_its_licence() -> None:
    names = {path.name for path in demo.model_path().iterdir()}
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {"LICENSE", "MODEL_CARD.md", *model} <= names
    weights = mx.load(str(demo.model_path() / "model.safetensors"))
    assert {weight.dtype for weight in weights.values()} == {mx.float16}
    assert "MIT" in (demo.model_path() / "LICENSE").read_text()


@pytest.mark.slow
def test_the_demo_runs_quietly_and_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "demo.json"
    flags = "--length 90 --max-kv-bytes 40KB --facts 2 --generate 5 --json"
    assert command.main([*flags.split(), str(file)]) == 0
    said, written = capsys.readouterr().out, json.loads(file.read_text())
    arms = {arm["name"]: arm for arm in written["arms"]}
    assert list(arms) == ["full", "kv4", "window", "keydiff 4 bits", "ours"]
    full, packed = (arms.pop(name) for name in ("full", "kv4"))
    assert full["top1_agreement"] == 1.0
    assert full["kv_bytes"] == 90 * 6 * 2 * 2 * 64 * 2  # 6 layers of 2 heads, 64 elements
    assert packed["kv_bytes"] == full["kv_bytes"] * 4.5 / 16  # two numbers of 16 bits for each 64
    for arm in arms.values():
        # Layers with more rows than the text has tokens leave some of the bytes.
        assert 28_000 < arm["kv_bytes"] <= 40_000
        assert arm["peak_decode_bytes"] < arm["peak_prefill_bytes"]
        assert f"{arm['perplexity']:.2f}" in said
        assert len(arm["tokens_per_second"]) == command.TURNS and arm["generated"]
    assert "\x1b" not in said
    assert said.startswith("| 90 tokens, demo ")
    shown(written)


def shown(found: dict[str, Any]) -> None:
    """Recall is left out where the full cache itself fails."""
    for known, is_shown in ((2, True), (1, False)):
        other = copy.deepcopy(found)
        other["arms"][0]["facts_recalled"] = [1.0] * known + [0.0] * (2 - known)
        other["arms"][0]["tokens_per_second"] = [1.0, 2.0, 900.0]
        lines = [line.split("|")[1:3] for line in command.arms_table(other).splitlines()]
        cells = {label.strip(): cell.strip() for label, cell in lines}
        assert ("facts recalled" in cells) is is_shown
        assert cells["tokens/s"] == "2"
        said = command.note(other).replace("\n", " ")
        assert f"Of 2 facts planted in it the full cache itself recalls {known}." in said


@pytest.mark.parametrize("longest", [0.0, 1000.0])
def test_a_model_that_takes_too_long_is_not_shown(
    longest: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "LONGEST_STEP", longest)
    name, model, _ = command.fast_enough(str(demo.model_path()))
    assert name == ("model" if longest else "demo")
    assert ("takes" in capsys.readouterr().err) is not bool(longest)
    assert len(model.layers) == 6


SIZES = [f"--max-kv-bytes {size}" for size in ("9GB", "400", "much")]


@pytest.mark.parametrize("typed", ["--model no/such/folder", *SIZES, "--facts 0", "--length 5000"])
def test_wrong_arguments_are_refused(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        sys.exit(ended("demo", lambda: command.main(typed.split())))
    assert capsys.readouterr().err.count("\n") == 1
