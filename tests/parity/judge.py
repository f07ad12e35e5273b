"""Compare what a leg found in attention and selection cases with what is expected."""

from __future__ import annotations

import math

import numpy as np

import reference
from golden.build import Case
from parity.outcome import Outcome, Verdict, failed


def judge(case: Case, outcome: Outcome) -> Verdict:
    """The verdict on an attention or a selection case."""
    if outcome.error:
        return failed(outcome.error)
    if outcome.refused:
        return Verdict(True, "refused", note=outcome.refused)
    return _attention(case, outcome) if case.fields["op"] == "attention" else _keep(case, outcome)


def _attention(case: Case, outcome: Outcome) -> Verdict:
    worst, where = 0.0, ""
    names = ("out", "scores", "lse") if case.fields["return_lse"] else ("out", "scores")
    for name in names:
        if name not in outcome.arrays:
            return failed(f"no {name}")
        error = reference.worst_error(outcome.arrays[name], case.tensors[f"{name}64"])
        ratio = reference.error_ratio(error, case.fields["tolerance"][name])
        if ratio > worst or not where:
            worst, where = ratio, f"{name} is off by {error:.3g}"
    ok = worst <= 1
    cell = f"{worst:.2f}" if math.isfinite(worst) else "wrong"
    return Verdict(ok, cell, worst, "" if ok else where)


def _keep(case: Case, outcome: Outcome) -> Verdict:
    for name in ("keep", "evict"):
        if name not in outcome.arrays:
            return failed(f"no {name}")
        expected, found = np.array(case.tensors[name]), outcome.arrays[name]
        if found.shape != expected.shape:
            return Verdict(False, "wrong", note=f"{name} has shape {found.shape}")
        if not np.array_equal(found, expected):
            head = tuple(int(i) for i in np.argwhere(found != expected)[0][:2])
            note = f"{name} of head {head}: {found[head].tolist()}, not {expected[head].tolist()}"
            return Verdict(False, "wrong", note=note)
    return Verdict(True, "same")
