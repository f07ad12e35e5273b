"""`python -m mlx_h2o.hardware`: every operation and kernel has a case, and faults are found."""

import json
import sys
import tomllib

import mlx.core as mx
import pytest

from back_ends import registered
from emulator.backend import Recorder
from emulator.row_cases import named_emulator
from mlx_h2o.cli import ended
from mlx_h2o.hardware import parity, tables, timings
from mlx_h2o.hardware.__main__ import MODEL, main
from mlx_h2o.lm.plan import random_model
from mlx_h2o.operations.resolved import Operations
from models.tiny import build
from parity.test_parity_coverage import KERNELS, told_apart
from paths import ROOT


def test_every_operation_has_a_case() -> None:
    table = tomllib.loads((ROOT / "metal" / "operations.toml").read_text("ascii"))
    assert {operation for operation, *_ in parity.operation_cases()} == table.keys()


def test_every_kernel_has_a_case() -> None:
    with named_emulator(recorder := Recorder()):
        for _, _, call in parity.operation_cases():
            call()
    assert {told_apart(each.kernel)[0] for each, _ in recorder.launched} == KERNELS


def test_a_wrong_back_end_is_seen() -> None:
    class Wrong(Operations):
        def attend(self, request):
            found = super().attend(request)
            return found._replace(out=found.out * 1.1)

    with registered("wrong", Wrong()):
        found = parity.compare("wrong")
    assert {case.partition(",")[0] for case in found["failed"]} == {
        "scaled_dot_product_attention_with_scores",
        "scaled_dot_product_attention_quantized_with_scores",
        "attention_and_accumulate",
    }


@pytest.mark.slow
def test_it_writes_figures_and_their_table(tmp_path, capsys) -> None:
    file = tmp_path / "here.json"
    flags = "--model demo --lengths 64 --repeats 2 --tokens 2 --output"
    assert main([*flags.split(), str(file)]) == 0
    result = json.loads(file.read_text())
    arms = result["speed"]["lengths"]["64"]
    assert len(arms) == 5
    for one in arms.values():
        assert one["prefill"] > 0 < one["decode"]
        assert one["cache"] < one["peak"] > result["speed"]["weights"]
    assert arms["ours, turbo3"]["cache"] < arms["ours"]["cache"] < arms["mlx_lm"]["cache"]
    written = file.with_suffix(".md").read_text()
    assert tables.hardware_table(result) in written
    assert written in capsys.readouterr().out


def test_caches_that_a_model_cannot_read_are_left_out(capsys) -> None:
    model = build("deepseek_v3", kv_lora_rank=64, qk_rope_head_dim=64)
    names = [*timings._makes(model, mx.zeros(40, mx.int32))]
    assert names == ["mlx_lm", "ours", "ours, 6 and 5 bits"]
    assert "swapaxes" in capsys.readouterr().err.partition("\n")[0]  # mlx_lm's packed latents


WRONG = [("--output=a", "none is not"), ("--output=a.md", "has .md"), ("--tokens=1", "Is a dir")]


@pytest.mark.parametrize(("flag", "said"), WRONG)
def test_what_is_wrong_is_told_at_once(flag, said, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hardware.json").mkdir()  # the usual file
    with pytest.raises(SystemExit, match="2"):
        sys.exit(ended("hardware", lambda: main(["--model", str(tmp_path / "none"), flag])))
    assert said in capsys.readouterr().err


def test_a_known_model_has_random_weights() -> None:
    assert random_model(MODEL).layers[0].self_attn.q_proj.bits == 4
    assert random_model("no model") is None


@pytest.mark.exhaustive
def test_the_metal_text_passes_on_the_emulator() -> None:
    with named_emulator():
        found = parity.compare("emulator")
    # What a GPU packs is compared with MLX on that GPU; the emulator rounds as Metal, MLX as a CPU.
    assert {case.partition(",")[0] for case in found["failed"]} <= {"quantize_append"}
