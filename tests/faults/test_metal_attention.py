"""Faults in the Metal text of decode attention: the emulator and the reference catch each."""

from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from emulator import EmulatorBackend, KernelError, Run
from emulator.cases import Case, errors
from emulator.marks import EMULATED
from faults.metal import in_one_kernel, seeded
from faults.text import table
from mlx_h2o.operations.requests import AttentionRequest

pytestmark = EMULATED

FAULTS = table("attention")
WRONG = "differs from the reference"
SMALL = Case(heads=(4, 2), queries=2, rows=40)
MASKED = replace(SMALL, mask="add-f32", sinks="f32")
PACKED = replace(SMALL, sizes=(96, 192), bits=(3, 6), group=32)
CODES = replace(SMALL, sizes=(128, 64), kv_format="turbo2v3")
SPARSE = Case(
    rows=200, heads=(4, 2), bits=(8, 8), sparse=5e-3, mask="bool", simdgroups=2, skipped=True
)
CASES = {
    "": replace(SMALL, rows=70, mask="causal", slack=2),
    "masked": MASKED,
    "biased": replace(SMALL, mask="bool", bias=True),
    "two passes": replace(MASKED, blocks=3, simdgroups=2),
    "packed": PACKED,
    "packed slice": replace(PACKED, slack=2),
    "codes": CODES,
    "codes slice": replace(CODES, slack=2),
    "sparse": SPARSE,
    "sparse unskipped": replace(SPARSE, skipped=False),
    "sparse blocks": replace(SPARSE, blocks=3),
}
# The last with an exp and a max that lose NaN, as those of a GPU may.
SCHEDULES = (
    Run("forward"),
    Run("reverse"),
    Run("random", seed=3),
    Run("forward", defines=("H2O_LOOSE_NAN",)),
)


@cache
def request_for(case: Case) -> AttentionRequest:
    """The call that a fault is shown on; a masked one has all the corners of masks in it."""
    request = case.request()
    if case.bias:
        bias = np.array(request.row_bias)
        bias[0, 0, 7] = np.nan
        request = replace(request, row_bias=mx.array(bias))
    if case.mask != "add-f32":
        return request
    mask = np.array(request.mask)
    mask[0, 1, 0, 3:6] = np.finfo(np.float32).min
    mask[0, 2, 1, 7] = np.nan
    # The first head has neither keys nor a sink.
    sinks = np.array(request.sinks)
    sinks[0] = -np.inf
    return replace(request, mask=mx.array(mask), sinks=mx.array(sinks))


def is_wrong(backend: EmulatorBackend, request: AttentionRequest) -> bool:
    """Whether any output differs from the reference by more than its tolerance."""
    return max(errors(request, backend.attend(request)).values()) > 1


def symptom(backend: EmulatorBackend, request: AttentionRequest) -> str:
    """What shows that something is wrong; empty if nothing is."""
    try:
        return WRONG if is_wrong(backend, request) else ""
    except KernelError as error:
        return str(error)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernel_without_a_fault_passes(case: Case) -> None:
    for run in SCHEDULES:
        assert symptom(case.backend(run), request_for(case)) == ""


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    fault = FAULTS[name]
    case, caught, found = CASES[fault.case], fault.caught or WRONG, []
    for run in SCHEDULES:
        backend = seeded(fault, case.backend(run))
        found.append(symptom(backend, request_for(case)))
        in_one_kernel(fault, backend.edited)
        if caught in found[-1]:
            return
    raise AssertionError(f"expected {caught!r}, found {found}")
