"""benchmarks/grouped_registers.py: its arithmetic, its drafts, and what the docs quote."""

from __future__ import annotations

import json

import pytest

import nvrtc
from paths import ROOT

SCRIPT = "grouped_registers"


@pytest.mark.parametrize(
    ("registers", "simdgroups", "warps"),
    [(32, 32, 64), (33, 32, 32), (64, 32, 32), (65, 32, 0), (78, 8, 24), (128, 8, 16), (16, 1, 32)],
)
def test_resident_warps_come_in_whole_threadgroups(benchmark, registers, simdgroups, warps):
    assert benchmark.resident_warps(registers, simdgroups) == warps


def test_the_documentation_quotes_the_committed_result():
    result = json.loads((ROOT / "benchmarks/results/grouped_registers.json").read_text())
    assert {"machine", "compiler", "mlx_h2o"} <= result["environment"].keys()
    drafts = [one for one in result["results"] if (one["heads"], one["simdgroups"]) == (8, 8)]
    least, most = (limit(one["registers"] for one in drafts) for limit in (min, max))
    (warps,) = {one["resident_warps"] for one in drafts}
    text = " ".join((ROOT / "docs" / "internals" / "kernels.md").read_text().split())
    assert f"{least} to {most} registers and leaves {warps} warps of 64" in text


@pytest.mark.exhaustive
def test_a_head_costs_its_query_its_sums_and_two_more(benchmark):
    try:
        nvrtc.toolkit()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    needs = [
        next(iter(nvrtc.compile_cuda(benchmark.draft(heads, None, 8), "sm_90").values()))
        for heads in (4, 8)
    ]
    assert [each.stack for each in needs] == [0, 0]
    assert 8 <= (needs[1].registers - needs[0].registers) / 4 <= 12
