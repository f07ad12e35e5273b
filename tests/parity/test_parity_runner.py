"""The parity runner finds a fault in a leg and names the case."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from golden.build import Case, trace_case
from mlx_h2o.operations import composed
from mlx_h2o.operations.backends import register
from mlx_h2o.operations.requests import AttentionRequest
from parity import runner, traces
from parity.__main__ import main
from parity.outcome import Outcome
from parity.swift_leg import SwiftLeg
from parity.trace_reference import run_reference


class Broken:
    """The composed back end with a fault; ``fault`` sees request and results of attention."""

    name = "broken"

    def __init__(self, fault=None, select=None) -> None:
        self.fault = fault or (lambda request, found: found)
        self.select = select or (lambda request, slots: slots)

    def unavailable_reason(self) -> str:
        return ""

    def refuses(self, request: AttentionRequest) -> str:
        return ""

    def attention(self, request: AttentionRequest):
        return self.fault(request, composed.attention(request))

    def keep_indices(self, *rows: mx.array, **given: object) -> mx.array:
        return self.select(given, composed.keep_indices(*rows, **given))


@pytest.fixture
def broken(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Run the runner on a leg with the given faults: (exit status, standard error, JSON)."""
    removals = []

    def run(cases: str, **faults):
        removals.append(register("broken", Broken(**faults)))
        path = tmp_path / "parity.json"
        options = ["--legs", "reference,composed,broken", "--cases", cases, "--json", str(path)]
        status = main([*options, "--build-dir", str(tmp_path)])
        return status, capfd.readouterr().err, json.loads(path.read_text())

    yield run
    for remove in removals:
        remove()


def names(stderr: str) -> set[str]:
    return {line.split(" (")[0] for line in stderr.splitlines()}


def test_a_leg_without_a_fault_passes(broken) -> None:
    status, stderr, found = broken("sinks-*")
    assert (status, stderr, found["failures"]) == (0, "", [])
    assert len(found["cases"]) == 9
    for column in found["cases"].values():
        assert column["broken"] == column["composed"]
        assert column["broken"]["ok"] and 0 < column["broken"]["ratio"] <= 1
    assert found["legs"]["broken"]["versions"]["mlx"]


def one_score_off(request, found):
    if request.queries.shape[2] == 3:
        found.scores[..., -1] += 1e-4
    return found


def test_a_small_error_in_scores_names_its_cases(broken) -> None:
    status, stderr, found = broken("queries-*", fault=one_score_off)
    assert status == 1
    # A masked last key stays -inf, so of the two cases at Lq = 3 both see it in the last query.
    assert names(stderr) == {"queries-3-group-4", "queries-3-group-4-causal"}
    assert "(broken)" in stderr and "scores is off by 0.0001" in stderr
    assert len(found["failures"]) == 2


def test_a_leg_that_raises_fails_its_case_only(broken) -> None:
    def fault(request, found):
        if request.causal:
            raise RuntimeError("boom")
        return found

    status, stderr, found = broken("slack-*", fault=fault)
    assert status == 1
    assert names(stderr) == {f"slack-causal-{kind}" for kind in ("f32", "f16", "bf16")}
    assert "RuntimeError: boom" in stderr
    assert found["cases"]["slack-f32"]["broken"]["ok"]


@pytest.mark.slow
def test_a_trace_whose_eviction_is_off_by_one(broken) -> None:
    def select(request, slots):
        return (slots + 1) % request.scores.shape[2]

    status, stderr, _ = broken("trace-window", select=select)
    assert status == 1
    assert names(stderr) == {"trace-window"}


# Legs that cannot run


def test_a_leg_that_cannot_run_passes_with_its_reason_but_not_in_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MLX_H2O_SWIFT_PARITY", str(tmp_path / "none"))
    monkeypatch.delenv("CI", raising=False)
    path = tmp_path / "parity.json"
    options = ["--legs", "composed,swift", "--cases", "slack-f32", "--json", str(path)]
    options += ["--build-dir", str(tmp_path)]
    assert main(options) == 0
    assert "swift: not run: swift not found" in capfd.readouterr().out
    assert json.loads(path.read_text())["legs"]["swift"]["not_run"] == "swift not found"
    monkeypatch.setenv("CI", "true")
    assert main(options) == 1
    assert "swift: not run: swift not found" in capfd.readouterr().err


def test_an_unknown_leg_or_case(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "no such case", "--build-dir", str(tmp_path)]) == 2
    with pytest.raises(SystemExit):
        main(["--legs", "composed,fortran", "--build-dir", str(tmp_path)])
    assert "unknown leg 'fortran'" in capfd.readouterr().err


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "mlx-h2o-parity"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("body", ["echo no such file >&2; exit 3", "exit 0"])
def test_an_executable_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setenv("MLX_H2O_SWIFT_PARITY", str(script(tmp_path, body)))
    cases = runner.all_cases(0, "slack-f32")
    leg = SwiftLeg("swift", "native")
    assert leg.not_run() == ""
    ((name, outcome),) = leg.run(cases, tmp_path)
    assert name == "slack-f32"
    assert "mlx-h2o-parity ended with" in outcome.error


def test_the_results_of_an_executable_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_H2O_SWIFT_PARITY", str(script(tmp_path, f'cp "{tmp_path}/made" "$4"')))
    good, wrong, bad, lacking = (
        runner.all_cases(0, name)[0] for name in ("sinks-f32", "slack-f32", "batch-3", "keep-one")
    )
    tensors = {
        f"{case.name}/{key}": case.tensors[f"{key}64"]
        for case in (good, wrong)
        for key in ("out", "scores", "lse")
    }
    tensors["slack-f32/out"] = tensors["slack-f32/out"] + 1
    metadata = {"errors": json.dumps({bad.name: "it broke"}), "versions": '{"swift": "6"}'}
    mx.save_safetensors(str(tmp_path / "made.safetensors"), tensors, metadata)
    (tmp_path / "made.safetensors").rename(tmp_path / "made")
    leg = SwiftLeg("swift", "native")
    found = dict(leg.run([good, wrong, bad, lacking], tmp_path))
    judged = {
        case.name: runner._verdict(case, leg, found[case.name], {})
        for case in (good, wrong, bad, lacking)
    }
    assert {name: verdict.ok for name, verdict in judged.items()} == {
        good.name: True,
        wrong.name: False,
        bad.name: False,
        lacking.name: False,
    }
    assert judged[bad.name].note == "it broke"
    assert judged[lacking.name].note == "no keep"
    assert leg.versions() == {"swift": "6"}


# The rule for traces that part


def parted(near: float) -> tuple[Case, Outcome, Outcome]:
    """A trace, its reference, and a run whose head (0, 0) chose the other of two candidates.

    The C of the two differ by ``near``, relative, before the step.
    """
    case = trace_case("parted", policy="h2o-ema", zones=(1, 4, 3), prefill=(8,), steps=4)
    expected = run_reference(case)
    found = {name: array.copy() for name, array in expected.items()}
    step = 2
    before, after = (set(expected["positions"][i, 0, 0].tolist()) for i in (step - 1, step))
    (gone,) = before - after
    other = min(p for p in before & after if p >= 1)
    slots = expected["positions"][step - 1, 0, 0].tolist()
    scores = expected["scores"][step - 1, 0, 0]
    scores[slots.index(other)] = scores[slots.index(gone)] * (1 + near)
    for later in range(step, 4):
        rows = found["positions"][later, 0, 0]
        rows[rows == other] = gone
        rows.sort()
    base = Outcome(expected)
    return case, base, Outcome({"positions": found["positions"], "out": np.zeros(0)})


@pytest.mark.parametrize(
    ("near", "exact", "ok"), [(5e-6, False, True), (5e-6, True, False), (1e-4, False, False)]
)
def test_traces_may_part_only_at_equal_candidates(
    near: float, exact: bool, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_output_ratio", lambda *runs: 0.0)
    case, expected, found = parted(near)
    verdict = traces.judge(case, found, expected, exact=exact)
    assert verdict.ok is ok
    assert "head (0, 0), step 2: candidates" in verdict.note
