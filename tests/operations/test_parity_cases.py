"""The cases of all languages (tests/parity), on the CPU back ends.

Golden vectors, and every flag, packing and length on both sides of a boundary, against the float64
reference.
"""

from collections import defaultdict
from functools import cache

import pytest

from golden.build import Case
from golden.cases import random_cases
from golden.make import read
from parity import judge, operations
from parity.decode_cases import decode_cases
from parity.fold_cases import fold_cases
from parity.legs import PackageLeg
from parity.row_cases import row_cases
from parity.step_cases import step_cases

FAMILIES = (random_cases, decode_cases, row_cases, fold_cases, step_cases)


@cache
def cases() -> dict[str, list[Case]]:
    found = defaultdict(list)
    for case in (*read(), *(case for family in FAMILIES for case in family(0))):
        found[case.fields["op"]].append(case)
    return found


@pytest.mark.parametrize("op", ["attention", "keep", *operations.FUNCTIONS])
def test_every_case_is_right(op: str, backend: str) -> None:
    leg = PackageLeg(backend)
    assert len(cases()[op]) >= 8
    for case in cases()[op]:
        assert not leg.absent(case), case.name
        verdict = judge.judge(case, leg.outcome(case))
        assert verdict.ok, f"{case.name}: {verdict.note}"
