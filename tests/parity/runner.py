"""Run the legs over the cases and collect the verdicts."""

import fnmatch
import functools
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from golden.build import Case
from golden.cases import boundary_cases, fresh_traces, random_cases
from golden.make import read
from parity import judge, operations, traces
from parity.c_leg import CLeg
from parity.decode_cases import decode_cases
from parity.fold_cases import fold_cases
from parity.legs import EmulatorLeg, Leg, PackageLeg, ReferenceLeg
from parity.long_cases import long_cases
from parity.outcome import Outcome, Verdict
from parity.policy_cases import policy_cases
from parity.report import Report
from parity.row_cases import row_cases
from parity.step_cases import step_cases
from parity.swift_leg import SwiftLeg

# The order of the columns. The first that runs is the one that all traces are compared with.
NAMES = ("reference", "composed", "native", "emulator", "c", "c-composed")
NAMES += ("swift", "swift-composed")


def make_leg(name: str, build: Path) -> Leg:
    """The leg of this name; any other name is a registered back end of the package."""
    if name == "reference":
        return ReferenceLeg()
    if name == "emulator":
        return EmulatorLeg()
    kind, _, backend = name.partition("-")
    if kind == "c":
        return CLeg(name, backend or "native", build)
    if kind == "swift":
        return SwiftLeg(name, backend or "native")
    return PackageLeg(name)


def all_cases(seed: int, pattern: str = "*", *, long: bool = False) -> list[Case]:
    """The golden cases, shapes astride boundaries, and all that is drawn from the seed.

    ``pattern`` is a name, else a glob, else a part of names. ``long``: traces of 1,000 steps too.
    """
    cases = (*_every_case(seed), *(long_cases(seed) if long else ()))
    if not any(sign in pattern for sign in "*?[") and pattern not in {c.name for c in cases}:
        pattern = f"*{pattern}*"
    return [case for case in cases if fnmatch.fnmatch(case.name, pattern)]


@functools.cache
def _every_case(seed: int) -> tuple[Case, ...]:
    families = (random_cases, fresh_traces, policy_cases, decode_cases, row_cases, fold_cases)
    drawn = (family(seed) for family in (*families, step_cases))
    cases = (*read(), *boundary_cases(), *itertools.chain(*drawn))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    return cases


def run(
    cases: Sequence[Case], names: Iterable[str], build: Path, *, say=lambda text: None,
    emulate: int = 1,
) -> Report:  # fmt: skip
    """The verdicts of all legs on all cases; the emulator serves every ``emulate``-th alone."""
    left = {case.name for index, case in enumerate(cases) if index % emulate}
    report, outcomes = Report(list(cases)), {}
    directory = build / "parity"
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        leg = make_leg(name, build)
        reason = leg.not_run()
        if reason:
            report.not_run[name] = reason
            say(f"{name}: not run: {reason}")
            continue
        absent = {case.name: _absent(leg, case) for case in cases}
        if name == "emulator":
            absent |= dict.fromkeys(left, f"one case in {emulate} is emulated")
        report.absent[name] = {case: reason for case, reason in absent.items() if reason}
        served = [case for case in cases if not absent[case.name]]
        say(f"{name}: {len(served)} cases")
        outcomes[name] = dict(leg.run(served, directory))
        report.versions[name] = leg.versions()
        report.verdicts[name] = {
            case.name: _verdict(case, leg, outcomes[name][case.name], outcomes) for case in served
        }
    return report


def _absent(leg: Leg, case: Case) -> str:
    """Why a leg does not serve a case: what it lacks, or that it is for another back end."""
    only = case.fields.get("only", "")
    if only and (leg.trace_of or leg.name) != only:
        return f"compared on the back end {only!r} alone"
    return leg.absent(case)


def _verdict(
    case: Case, leg: Leg, outcome: Outcome, outcomes: dict[str, dict[str, Outcome]]
) -> Verdict:
    if leg.name == "reference" and case.fields["op"] in operations.FUNCTIONS:
        return Verdict(not outcome.error, "error" if outcome.error else "base", note=outcome.error)
    if case.fields["op"] != "trace":
        return judge.judge(case, outcome)
    base = next(name for name, found in outcomes.items() if case.name in found)
    if leg.name == base == "reference":
        return Verdict(not outcome.error, "error" if outcome.error else "base", note=outcome.error)
    found = []
    if leg.trace_of == leg.name or leg.trace_of != base:
        found.append(traces.judge(case, outcome, outcomes[base][case.name], exact=False))
    if leg.trace_of != leg.name and leg.trace_of in outcomes:
        # The same back end, driven from another language: the same rows at every step.
        found.append(traces.judge(case, outcome, outcomes[leg.trace_of][case.name], exact=True))
    return next((verdict for verdict in found if not verdict.ok), found[0])
