"""The cases that all languages answer (tests/parity), on the back ends of the CPU.

Every flag, packing and length astride a boundary, against the float64 reference.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest

from golden.build import Case
from mlx_h2o.operations.backends import get
from parity import judge, operations
from parity.decode_cases import decode_cases
from parity.fold_cases import fold_cases
from parity.row_cases import row_cases
from parity.step_cases import step_cases

FAMILIES = (decode_cases, row_cases, fold_cases, step_cases)


@cache
def drawn() -> dict[str, list[Case]]:
    found = defaultdict(list)
    for case in (case for family in FAMILIES for case in family(0)):
        found[case.fields["op"]].append(case)
    return found


@pytest.mark.parametrize("op", operations.FUNCTIONS)
def test_every_case_is_right(op: str, backend: str) -> None:
    assert len(drawn()[op]) >= 8
    for case in drawn()[op]:
        assert not operations.absent(case, get(backend), backend), case.name
        verdict = judge.judge(case, operations.run(case, get(backend)))
        assert verdict.ok, f"{case.name}: {verdict.note}"
