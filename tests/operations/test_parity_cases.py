"""The cases that all languages answer (tests/parity), on the back ends of the CPU.

Golden vectors, and every flag, packing and length astride a boundary, against the float64
reference.
"""

from __future__ import annotations

import pytest

from parity import judge, operations, runner
from parity.legs import PackageLeg


@pytest.mark.parametrize("op", ["attention", "keep", *operations.FUNCTIONS])
def test_every_case_is_right(op: str, backend: str) -> None:
    leg = PackageLeg(backend)
    cases = [case for case in runner.all_cases(0) if case.fields["op"] == op]
    assert len(cases) >= 8
    for case in cases:
        assert not leg.absent(case), case.name
        verdict = judge.judge(case, leg.outcome(case))
        assert verdict.ok, f"{case.name}: {verdict.note}"
