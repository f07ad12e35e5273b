"""benchmarks/native_attention.py: a file keeps the parts that are not measured again."""

from __future__ import annotations

import json
import sys

import pytest

from benchmark_scripts import script

pytest.importorskip("mlx_h2o._core", reason="no native back end")


def run(case, rows):
    return {"case": case, "rows": rows, "caches": "cold", "arms": {}, "ratios": {}}


def test_parts_are_added_to_a_file(tmp_path, monkeypatch):
    file = tmp_path / "result.json"
    with script("native_attention") as module:

        def measured(parts, *runs):
            monkeypatch.setattr(module, "cases", lambda *_: iter(runs))
            flags = ["--json", str(file), "--parts", *parts]
            monkeypatch.setattr(sys, "argv", ["native_attention.py", *flags])
            module.main()
            return json.loads(file.read_text())

        first = measured(module.PARTS, run("dense", 1), run("bias", 1))
        assert [(one["case"], one["rows"]) for one in first["runs"]] == [("dense", 1), ("bias", 1)]
        found = measured(["bias"], run("bias", 2), run("bias", 3))
        assert found == first | {"runs": found["runs"]}
        dense, *added = found["runs"]
        assert dense == first["runs"][0]
        assert [(one["case"], one["rows"]) for one in added] == [("bias", 2), ("bias", 3)]
        assert all(one["environment"] == first["environment"] for one in added)
        assert all(
            one["repeats"] == 7 and len(one["load_average_before_and_after"]) == 2 for one in added
        )
        assert len(measured(module.PARTS, run("dense", 4))["runs"]) == 1
