"""benchmarks/batches.py: every arm decodes, evicts where it should, and the result says so."""

from __future__ import annotations

import json
import runpy
import sys

import pytest

from paths import BENCHMARKS


@pytest.mark.exhaustive
def test_the_benchmark_writes_its_result(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    file = tmp_path / "batches.json"
    flags = f"--sequences 2 --repeats 5 --tokens 1 --max-kv-size 16 --json {file}"
    monkeypatch.setattr(sys, "argv", ["batches.py", *flags.split()])
    runpy.run_path(str(BENCHMARKS / "batches.py"), run_name="__main__")
    result = json.loads(file.read_text())
    (run,) = result["runs"]
    assert result["environment"]["mlx"]
    arms = run["arms"]
    assert list(arms) == ["full", "rotating", "h2o-ema", "window", "keydiff", "keydiff 8-bit"]
    assert arms["keydiff 8-bit"]["bytes"] < arms["keydiff"]["bytes"] < arms["full"]["bytes"]
    assert "of rotating" in capsys.readouterr().out
