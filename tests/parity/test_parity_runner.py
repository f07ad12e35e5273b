"""The parity runner finds a fault in a leg and names its cases; it reports what cannot run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from back_ends import NATIVE, registered
from emulator.row_cases import named_emulator
from golden.build import Case, trace_case
from mlx_h2o.operations import composed
from mlx_h2o.operations.composed import accumulating, buffers
from mlx_h2o.operations.resolved import Operations
from parity import runner, traces
from parity.__main__ import main
from parity.c_leg import CLeg
from parity.legs import EmulatorLeg, PackageLeg
from parity.operations import FUNCTIONS
from parity.outcome import Outcome
from parity.swift_leg import SwiftLeg
from parity.trace_reference import run_reference

Run = Callable[..., tuple[int, str, dict[str, Any]]]
COMPOSED = {
    "attend": composed.attention,
    "keep_indices": composed.keep_indices,
    "accumulate_scores": accumulating.accumulate_scores,
    "quantize_append": buffers.quantize_append,
}


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the runner on a back end of these functions: exit status, standard error, JSON."""

    def runs(cases: str, **functions: Any) -> tuple[int, str, dict[str, Any]]:
        broken = Operations()
        vars(broken).update(functions, name="broken")
        path = tmp_path / "parity.json"
        options = ["--legs", "reference,composed,broken", "--cases", cases, "--json", str(path)]
        with registered("broken", broken):
            status = main([*options, "--build-dir", str(tmp_path)])
        return status, capfd.readouterr().err, json.loads(path.read_text())

    return runs


def test_a_leg_without_a_fault_passes(run: Run) -> None:
    status, stderr, found = run("sinks-*", **COMPOSED)
    assert (status, stderr, found["failures"]) == (0, "", [])
    assert len(found["cases"]) == 9
    for column in found["cases"].values():
        assert column["broken"] == column["composed"]
        assert column["broken"]["ok"] and 0 < column["broken"]["ratio"] <= 1
    assert found["legs"]["broken"]["versions"]["mlx"]


def one_score_off(request):
    found = composed.attention(request)
    if request.queries.shape[2] == 3:
        found.scores[..., -1] += 1e-4
    return found


def raises(request):
    if request.causal:
        raise RuntimeError("boom")
    return composed.attention(request)


def one_scale(request):
    """The scale of a row's first group serves all of them."""
    words, scales, biases = request.keys
    first = mx.broadcast_to(scales[..., :1], scales.shape)
    return composed.attention(replace(request, keys=(words, first, biases)))


def another_heads_bias(request):
    return composed.attention(replace(request, row_bias=mx.roll(request.row_bias, 1, axis=1)))


def one_clock(*rows, recent_start, **given):
    """The window of the first sequence is that of all."""
    return composed.keep_indices(*rows, recent_start=recent_start.reshape(-1)[0], **given)


def next_slots(scores, *rows, **given):
    return (composed.keep_indices(scores, *rows, **given) + 1) % scores.shape[2]


def next_slot(*, slots, **given):
    return buffers.quantize_append(slots=slots + 1, **given)


def decays_where_masked(importance, scores, *, decay, **given):
    found = accumulating.accumulate_scores(importance, scores, decay=decay, **given)
    return mx.where(found == importance, decay * found, found)


PACKED = "packed-one-pass-causal-sinks-no-lse-4.4-g32"
FAULTS: dict[str, tuple[str, Any, set[str]]] = {
    # A masked last key stays -inf, so of the two cases at Lq = 3 both see it in the last query.
    "queries-*": ("attend", one_score_off, {"queries-3-group-4", "queries-3-group-4-causal"}),
    "slack-*": ("attend", raises, {f"slack-causal-{kind}" for kind in ("f32", "f16", "bf16")}),
    "packed-one-pass-*-?.?-g32*": (
        "attend", one_scale, {f"{PACKED}-f16", f"{PACKED}-sparse-skipped-f16"}
    ),
    "bias-counts-one-*": (
        "attend", another_heads_bias, {"bias-counts-one-pass-f32", "bias-counts-one-pass-bf16"}
    ),
    "keep-??-of-two-clocks": (
        "keep_indices", one_clock, {"keep-39-of-two-clocks", "keep-33-of-two-clocks"}
    ),
    "append-?.*-f32": ("quantize_append", next_slot, {"append-8.8-g64-f32", "append-4.8-g64-f32"}),
    "accumulate-*masked": ("accumulate_scores", decays_where_masked, {"accumulate-all-masked"}),
    "trace-window": ("keep_indices", next_slots, {"trace-window"}),
}  # fmt: skip
SAID = {"queries-*": "scores is off by 0.0001", "slack-*": "RuntimeError: boom"}


@pytest.mark.parametrize("cases", FAULTS)
def test_a_fault_names_its_cases(run: Run, cases: str) -> None:
    name, function, expected = FAULTS[cases]
    status, stderr, found = run(cases, **COMPOSED | {name: function})
    assert status == 1
    assert {line.split(" (")[0] for line in stderr.splitlines()} == expected
    assert len(found["failures"]) == len(expected) and SAID.get(cases, "") in stderr


def test_a_back_end_without_the_operation_shows_na(run: Run) -> None:
    status, _, found = run("append-all-31-rows", attend=composed.attention)
    assert status == 0
    cell = found["cases"]["append-all-31-rows"]["broken"]
    assert cell == {"cell": "n/a", "note": "it has no 'append' of its own"}
    assert found["cases"]["append-all-31-rows"]["composed"]["ok"]


@NATIVE
def test_what_a_leg_does_not_have_is_absent(tmp_path: Path) -> None:
    codes = [case for case in runner.all_cases(0) if case.fields.get("kv_format")]
    others = (case for case in runner.all_cases(0) if not case.fields.get("kv_format"))
    by_op = {case.fields["op"]: case for case in others}
    assert {*FUNCTIONS} <= {*by_op}
    swift, c = SwiftLeg("swift", "native"), CLeg("c", "native", tmp_path)
    legs = (swift, c, PackageLeg("native"))
    assert codes and not any(leg.absent(case) for case in codes for leg in legs)
    absent = [{op for op, case in by_op.items() if leg.absent(case)} for leg in legs]
    assert absent[0] == absent[1] == absent[2]
    with named_emulator():
        # No kernel folds rows, averages scores or reads a chunk.
        absent = [{op for op, case in by_op.items() if EmulatorLeg().absent(case)}]
        assert absent == [{"accumulate", "fold", "prefill"}]
    composition = PackageLeg("composed")
    assert not any(composition.absent(case) for case in by_op.values())


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
    names = ("sinks-f32", "slack-f32", "batch-3", "keep-one")
    good, wrong, bad, lacking = cases = [runner.all_cases(0, name)[0] for name in names]
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
    found = dict(leg.run(cases, tmp_path))
    judged = {case.name: runner._verdict(case, leg, found[case.name], {}) for case in cases}
    assert [name for name, verdict in judged.items() if verdict.ok] == [good.name]
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
