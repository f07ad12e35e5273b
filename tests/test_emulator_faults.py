"""Faults put into the Metal text on purpose: the emulator and the reference catch each of them."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from emulator import EmulatorBackend, KernelError, Run
from emulator.build import compiler
from emulator.cases import Case, compile_all, errors, probe_error
from emulator.faults import (
    FAULTS,
    MASKED,
    PACKED,
    PROBED,
    SPARSE,
    SPARSE_BLOCKS,
    TWO_PASS,
    WRONG,
    Fault,
)
from mlx_h2o.operations import kernels, launch
from mlx_h2o.operations.requests import AttentionRequest, AttentionResult

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(
        compiler() is None and os.environ.get("CI") != "true",
        reason="no C++ compiler found (g++ or clang++)",
    ),
]

SCHEDULES = (Run("forward"), Run("reverse"), Run("random", seed=3))


@cache
def request_for(case: Case) -> AttentionRequest:
    """The call that a fault is shown on; a masked one has all the corners of masks in it."""
    request = case.request()
    if case.mask != "add-f32":
        return request
    mask = np.array(request.mask)
    mask[0, 1, 0, 3:6] = np.finfo(np.float32).min
    mask[0, 2, 1, 7] = np.nan
    # The first head has neither keys nor a sink.
    sinks = np.array(request.sinks)
    sinks[0] = -np.inf
    return replace(request, mask=mx.array(mask), sinks=mx.array(sinks))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_all((fault.backend(Run()), request_for(fault.case)) for fault in FAULTS.values())


def outcome(backend: EmulatorBackend, request: AttentionRequest) -> tuple[AttentionResult, bool]:
    """The result, and whether the scores of the probes are wrong."""
    result = backend.attention(request)
    return result, request.probes is not None and probe_error(request, result.probe_scores) > 1


def symptoms(fault: Fault | Case, request: AttentionRequest) -> list[str]:
    """What is wrong with the kernel, one line for each schedule that shows it."""
    found = []
    for run in SCHEDULES:
        try:
            result, wrong = outcome(fault.backend(run), request)
        except KernelError as error:
            found.append(str(error))
        else:
            if wrong or max(errors(request, result).values()) > 1:
                found.append(WRONG)
    return found


@pytest.mark.parametrize(
    "case", [Fault.case, MASKED, TWO_PASS, PACKED, SPARSE, SPARSE_BLOCKS, PROBED], ids=str
)
def test_the_kernel_without_a_fault_passes(case: Case) -> None:
    assert symptoms(case, request_for(case)) == []


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    fault = FAULTS[name]
    request = request_for(fault.case)
    passes = launch.plan(request, fault.case.simdgroups, fault.case.blocks).passes
    clean = [kernels.HEADER] if fault.in_header else [each.kernel.source for each in passes]
    changed = [text for text in clean if fault.old in text]
    assert len(changed) == 1 and fault.edit(changed[0]) != changed[0]
    found = symptoms(fault, request)
    assert any(fault.caught in symptom for symptom in found), found
