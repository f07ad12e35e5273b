"""A fault in an operation that only the package has: the runner fails and names the case."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from emulator import EmulatorBackend
from mlx_h2o.operations import composed
from mlx_h2o.operations.backends import register
from mlx_h2o.operations.composed import rows as composed_cache
from parity import runner
from parity.__main__ import main
from parity.c_leg import CLeg
from parity.legs import EmulatorLeg, PackageLeg
from parity.operations import FUNCTIONS
from parity.swift_leg import SwiftLeg


class Composition:
    """A back end that has every function of its own, and composes them all."""

    name = "broken"

    def unavailable_reason(self) -> str:
        return ""

    def refuses(self, request: object) -> str:
        return ""

    def attention(self, request):
        return composed.attention(request)

    accumulate_scores = staticmethod(composed_cache.accumulate_scores)
    keep_indices = staticmethod(composed.keep_indices)
    quantize_append = staticmethod(composed_cache.quantize_append)


@pytest.fixture
def run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[[str, object], tuple[int, set[str], dict[str, Any]]]:
    """Run the runner on a back end: exit status, names of the cases that failed, JSON."""

    def runs(cases: str, backend: object):
        path = tmp_path / "parity.json"
        options = ["--legs", "reference,composed,broken", "--cases", cases, "--json", str(path)]
        remove = register("broken", backend)
        try:
            status = main([*options, "--build-dir", str(tmp_path)])
        finally:
            remove()
        lines = capfd.readouterr().err.splitlines()
        return status, {line.split(" (")[0] for line in lines}, json.loads(path.read_text())

    return runs


class NoGroups(Composition):
    """The scale of a row's first group serves all of them."""

    def attention(self, request):
        words, scales, biases = request.keys.parts
        first = mx.broadcast_to(scales[..., :1], scales.shape)
        keys = replace(request.keys, parts=(words, first, biases))
        return composed.attention(replace(request, keys=keys))


class OneClock(Composition):
    """The window of the first sequence is that of all."""

    def keep_indices(self, *rows, recent_start, **given):
        if isinstance(recent_start, mx.array):
            recent_start = recent_start.reshape(-1)[0]
        return composed.keep_indices(*rows, recent_start=recent_start, **given)


class WritesNextSlot(Composition):
    def quantize_append(self, *, slots, **given):
        return composed_cache.quantize_append(slots=slots + 1, **given)


FAULTS = {
    "packed-one-pass-*-?.?-g32*": (NoGroups(), {
        "packed-one-pass-causal-sinks-no-lse-4.4-g32-f16",
        "packed-one-pass-causal-sinks-no-lse-4.4-g32-sparse-skipped-f16",
    }),
    "keep-??-of-two-clocks": (OneClock(), {"keep-39-of-two-clocks", "keep-33-of-two-clocks"}),
    "append-?.*-f32": (WritesNextSlot(), {"append-8.8-g64-f32", "append-4.8-g64-f32"}),
}  # fmt: skip


@pytest.mark.parametrize("cases", FAULTS)
def test_a_fault_names_its_cases(run, cases: str) -> None:
    backend, expected = FAULTS[cases]
    status, named, found = run(cases, backend)
    assert status == 1
    assert named == expected
    assert len(found["failures"]) == len(expected)


# No silent pass


def test_a_back_end_without_the_operation_shows_na(run) -> None:
    class Attention:
        name = "broken"
        unavailable_reason = Composition.unavailable_reason
        refuses = Composition.refuses
        attention = Composition.attention

    status, _, found = run("append-all-31-rows", Attention())
    assert status == 0
    cell = found["cases"]["append-all-31-rows"]["broken"]
    assert cell == {"cell": "n/a", "note": "it has no 'append' of its own"}
    assert found["cases"]["append-all-31-rows"]["composed"]["ok"]


def test_what_a_leg_does_not_have_is_absent(tmp_path: Path) -> None:
    codes = [case for case in runner.all_cases(0) if case.fields.get("kv_format")]
    others = (case for case in runner.all_cases(0) if not case.fields.get("kv_format"))
    by_op = {case.fields["op"]: case for case in others}
    assert {*FUNCTIONS} <= {*by_op}
    swift, c = SwiftLeg("swift", "native"), CLeg("c", "native", tmp_path)
    legs = (swift, c, PackageLeg("native"))
    some = [case for case in codes if case.fields["op"] != "without_scores"]
    assert some and not any(leg.absent(case) for case in some for leg in legs)
    absent = [{op for op, case in by_op.items() if leg.absent(case)} for leg in legs]
    # No public call asks for attention without scores; the rest is what the back end has.
    assert absent[0] == absent[1] == absent[2] | {"without_scores"}
    remove = register("emulator", EmulatorBackend())
    try:
        # Rows merge by no kernel.
        assert {op for op, case in by_op.items() if EmulatorLeg().absent(case)} == {"fold"}
    finally:
        remove()
    composition = PackageLeg("composed")
    assert not any(composition.absent(case) for case in by_op.values())
