"""benchmarks/cache_bytes.py: the arithmetic of bytes per row, and the committed result."""

import json
import re
from pathlib import Path

import pytest

from mlx_h2o import H2OConfig
from paths import ROOT

SCRIPT = "cache_bytes"

RESULT = ROOT / "benchmarks" / "results" / "cache_bytes.json"

# Of a row of 128 elements in float16: numbers, or codes with a scale and a bias per 64.
DENSE, BITS_8, BITS_4 = 256, 128 + 2 * 4, 64 + 2 * 4
GROUP = H2OConfig().budget.evict_every
NEWEST = 32 + GROUP  # dense rows in mixed precision: those that are asked for, and those that wait

ROWS = {
    "dense": 256 * 2 * DENSE,
    "8 bits": 256 * 2 * BITS_8,
    "8 and 4 bits by rank, newest 32 dense": NEWEST * 2 * DENSE
    + (256 - NEWEST) // 2 * 2 * (BITS_8 + BITS_4),
    "K8/V4, newest 32 dense": NEWEST * 2 * DENSE + (256 - NEWEST) * (BITS_8 + BITS_4),
    "K8/V4": 256 * (BITS_8 + BITS_4),
    "4 bits": 256 * 2 * BITS_4,
}


def bytes_of(name: str) -> int:
    """Bytes of a layer of 8 heads: rows, scores, positions of all but the newest rows and, for
    packed rows, the centres of keys and values."""
    centres = 0 if name == "dense" else 2 * DENSE
    return 8 * (ROWS[name] + 256 * 4 + (256 - GROUP) * 4 + centres)


@pytest.mark.parametrize("name", ROWS)
def test_bytes_are_what_the_arithmetic_says(benchmark, name):
    found = benchmark.one_layer(name, 600, 256)
    assert found["rows"] == 256
    assert found["bytes"] == bytes_of(name)
    parts = ("codes_or_numbers", "scales_and_biases", "scores_positions_and_centres")
    assert found["bytes"] == sum(found[part] for part in parts)


def test_the_committed_result_is_of_these_bytes():
    found = json.loads(RESULT.read_text())["one_layer_2048_to_256"]
    assert {name: one["bytes"] for name, one in found.items()} == {
        name: bytes_of(name) for name in ROWS
    }


@pytest.mark.slow
def test_a_process_says_its_peaks(benchmark):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is reset through /proc, which is Linux's")
    found = benchmark.common.in_a_process(benchmark.process, "8 bits", 512, 128, 2, 128)
    rows = 2 * 8 * 128 * (2 * BITS_8 + 4 + 4)
    centres = 2 * 8 * 2 * 128 * 2
    assert rows - 2 * 8 * 4 * GROUP <= found["bytes"] - centres <= rows
    for when in ("reading", "writing"):
        assert found[when]["mlx_peak"] >= found["bytes"]
        assert found[when]["process_peak"] > 0
    assert not re.search("nan", str(found))
