"""benchmarks/speculation.py: every arm decodes, drafts are taken, and the result says so."""

from __future__ import annotations

import json
import runpy
import sys

import pytest

from paths import BENCHMARKS


@pytest.mark.exhaustive
def test_the_benchmark_writes_its_result(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    file = tmp_path / "speculation.json"
    flags = f"--policies h2o --repeats 5 --tokens 2 --max-kv-size 16 --json {file}"
    monkeypatch.setattr(sys, "argv", ["speculation.py", *flags.split()])
    runpy.run_path(str(BENCHMARKS / "speculation.py"), run_name="__main__")
    result = json.loads(file.read_text())
    (run,) = result["runs"]
    assert result["environment"]["mlx"]
    arms = run["arms"]
    drafts = ("plain", "drafts for itself", "replay")
    assert list(arms) == [f"{kind}, {draft}" for kind in ("evicting", "full") for draft in drafts]
    # Full caches give the same logits however tokens are grouped, so every draft is right.
    assert arms["full, drafts for itself"]["accepted_per_round"] == 3
    assert arms["full, replay"]["accepted_per_round"] == 3
    assert 0 < arms["evicting, replay"]["accepted_per_round"] <= 3
    assert list(run["cache_work"]) == ["plain", "target", "draft"]
    assert "accepted 3.0" in capsys.readouterr().out
