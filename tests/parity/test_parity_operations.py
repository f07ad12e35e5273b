"""A fault in an operation that only the package has: the runner fails and names the case."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from emulator import EmulatorBackend, compiler
from faults.metal import in_one_kernel, seeded
from faults.text import Edit
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

    def accumulate_scores(self, request):
        return composed_cache.accumulate_scores(request)

    def keep_indices(self, request):
        return composed.keep_indices(request)

    def quantize_append(self, request):
        return composed_cache.quantize_append(request)


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


@pytest.mark.slow
def test_every_operation_agrees_without_a_fault(run) -> None:
    rows = ("accumulate", "append", "attend")
    for op in ("packed-one*", "without*-one*", *rows):
        status, named, found = run(op, Composition())
        assert (status, named) == (0, set())
        assert {cells["broken"]["cell"] for cells in found["cases"].values()}.isdisjoint({"n/a"})


class NoGroups(Composition):
    """The scale of a row's first group serves all of them."""

    def attention(self, request):
        keys = request.keys
        first = mx.broadcast_to(keys.scales[..., :1], keys.scales.shape)
        return composed.attention(replace(request, keys=replace(keys, scales=first)))


class DropsTooMuch(Composition):
    def attention(self, request):
        sparse = 0.02 if request.sparse_v_threshold else 0.0
        return composed.attention(replace(request, sparse_v_threshold=sparse))


class ScoresAnyway(Composition):
    def attention(self, request):
        return composed.attention(replace(request, return_scores=True))


class BiasOfAnotherHead(Composition):
    def attention(self, request):
        bias = request.row_bias
        return composed.attention(
            replace(request, row_bias=None if bias is None else bias[:, ::-1])
        )


class DecaysWhereMasked(Composition):
    """C decays where a pair is masked for the whole group."""

    def accumulate_scores(self, request):
        after = composed_cache.accumulate_scores(request)
        kept = mx.equal(after, request.importance)
        return mx.where(kept, after * request.decay, after)


class NextSlot(Composition):
    def keep_indices(self, request):
        return (composed.keep_indices(request) + 1) % request.scores.shape[2]


class OneClock(Composition):
    """The window of the first sequence is that of all."""

    def keep_indices(self, request):
        start = request.recent_start
        if isinstance(start, mx.array):
            start = start.reshape(-1)[0]
        return composed.keep_indices(replace(request, recent_start=start))


class WritesNextSlot(Composition):
    def quantize_append(self, request):
        return composed_cache.quantize_append(request._replace(slots=request.slots + 1))


class BiasesOfAnotherRow(Composition):
    def quantize_append(self, request):
        keys, (words, scales, biases) = composed_cache.quantize_append(request)
        return keys, (words, scales, mx.roll(biases, 1, axis=2))


FAULTS = {
    "packed-one-pass-*-?.?-g32*": (NoGroups(), {
        "packed-one-pass-causal-sinks-no-lse-4.4-g32-f16",
        "packed-one-pass-causal-sinks-no-lse-4.4-g32-sparse-skipped-f16",
    }),
    "packed-one-pass-[uc]*": (DropsTooMuch(), {
        "packed-one-pass-causal-sinks-no-lse-4.4-g32-sparse-skipped-f16",
        "packed-one-pass-unmasked-bias-8.8-g64-sparse-f32",
    }),
    "without-scores-one-pass-*": (ScoresAnyway(), {
        "without-scores-one-pass-bool-bias-bf16",
        "without-scores-one-pass-unmasked-sinks-bias-no-lse-f16",
    }),
    "bias-nan-*-one-pass": (BiasOfAnotherHead(), {
        "bias-nan-additive-one-pass", "bias-nan-packed-one-pass", "bias-nan-sparse-one-pass",
    }),
    "attend-dense-*": (BiasOfAnotherHead(), {
        "attend-dense-1030-bias-f16", "attend-dense-bias-nan",
    }),
    "accumulate-[uan]*": (DecaysWhereMasked(), {"accumulate-all-masked"}),
    "evict-one-rows-32": (NextSlot(), {"evict-one-rows-32"}),
    "keep-??-of-two-clocks": (OneClock(), {"keep-39-of-two-clocks", "keep-33-of-two-clocks"}),
    "append-?.*-f32": (WritesNextSlot(), {"append-8.8-g64-f32", "append-4.8-g64-f32"}),
    "append-all-3[12]-rows": (BiasesOfAnotherRow(), {"append-all-31-rows", "append-all-32-rows"}),
}  # fmt: skip


@pytest.mark.parametrize("cases", FAULTS)
def test_a_fault_names_its_cases(run, cases: str) -> None:
    backend, expected = FAULTS[cases]
    status, named, found = run(cases, backend)
    assert status == 1
    assert named == expected
    assert len(found["failures"]) == len(expected)


KERNEL_FAULTS = {
    "packed-rows-102?-*": (
        Edit("sdpa_vector_2pass_1", "key_step = blocks * NS", "key_step = NS"),
        {"packed-rows-1024-8-bf16", "packed-rows-1025-4-f32"},
    ),
    "accumulate-rows-33": (
        Edit("accumulate_scores", "average != average", "average == 0.0f"),
        {"accumulate-rows-33"},
    ),
    "append-?.*-f32": (Edit("pack_rows", "is_key ? KB : VB", "KB"), {"append-4.8-g64-f32"}),
    "keep-39-of-two-clocks": (
        Edit("keep_rows", "recent_starts[batch * recent_starts_strides[0]]", "recent_starts[0]"),
        {"keep-39-of-two-clocks"},
    ),
    "evict-one-rows-1023": (
        Edit("keep_rows", "key.lower >= lower", "key.lower > lower"),
        {"evict-one-rows-1023"},
    ),
}


@pytest.mark.emulator
@pytest.mark.skipif(
    compiler() is None and os.environ.get("CI") != "true",
    reason="no C++ compiler found (g++ or clang++)",
)
@pytest.mark.faults
@pytest.mark.parametrize("cases", KERNEL_FAULTS)
def test_a_fault_in_the_text_of_a_kernel_names_its_cases(run, cases: str) -> None:
    edit, expected = KERNEL_FAULTS[cases]
    backend = seeded(edit)
    status, named, _ = run(cases, backend)
    in_one_kernel(edit, backend.edited)
    assert (status, named) == (1, expected)
    status, named, _ = run(cases, EmulatorBackend())
    assert (status, named) == (0, set())


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
