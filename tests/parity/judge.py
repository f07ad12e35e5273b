"""Compare what a leg found in a case with what is expected, except for traces."""

import math

import numpy as np

import reference
from golden.build import Case
from parity.outcome import Outcome, Verdict, failed


def judge(case: Case, outcome: Outcome) -> Verdict:
    """The verdict on a case that is not a trace."""
    if outcome.error:
        return failed(outcome.error)
    if outcome.refused:
        return Verdict(True, "refused", note=outcome.refused)
    return _keep(case, outcome) if case.fields["op"] == "keep" else _within(case, outcome)


def _within(case: Case, outcome: Outcome) -> Verdict:
    """Every output that has a tolerance, against float64; a tolerance of 0 asks for equality."""
    worst, where = 0.0, ""
    for name in case.fields["tolerance"]:
        if name == "lse" and not case.fields.get("return_lse", True):
            continue
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
    if "keep" not in outcome.arrays:
        return failed("no keep")
    expected, found = np.array(case.tensors["keep"]), outcome.arrays["keep"]
    if found.shape != expected.shape:
        return Verdict(False, "wrong", note=f"keep has shape {found.shape}")
    if not np.array_equal(found, expected):
        head = tuple(int(i) for i in np.argwhere(found != expected)[0][:2])
        note = f"keep of head {head}: {found[head].tolist()}, not {expected[head].tolist()}"
        return Verdict(False, "wrong", note=note)
    return Verdict(True, "same")
