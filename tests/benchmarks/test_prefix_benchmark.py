"""benchmarks/prefix_sharing.py: both arms give the answers of each prompt alone, and record it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system tells no Pss")
def test_the_benchmark_writes_its_result(tmp_path):
    file = tmp_path / "prefix_sharing.json"
    flags = f"--sequences 3 --prefix 64 --own-rows 40 --tokens 3 --step 32 --json {file}"
    command = [sys.executable, str(ROOT / "benchmarks" / "prefix_sharing.py"), *flags.split()]
    subprocess.run(command, check=True, timeout=300)
    result = json.loads(file.read_text())
    shared, unshared = result["arms"]["shared"], result["arms"]["unshared"]
    assert shared["answers_as_alone"] == unshared["answers_as_alone"] == 3
    assert shared["cache_bytes"]["max"] < unshared["cache_bytes"]["min"] / 1.5
    assert result["repeats"] == 5 and result["environment"]["mlx"]
