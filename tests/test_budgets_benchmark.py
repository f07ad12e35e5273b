"""benchmarks/budgets.py: the ways to spend the same rows, and what the committed result says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from mlx_h2o import H2OConfig
from mlx_h2o.lm.profiling import LayerProfile, Profile

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("budgets_benchmark", FOLDER / "budgets.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FOLDER))


def test_every_way_spends_the_same_rows(benchmark):
    layers = tuple(LayerProfile(h, c, 1.0) for h, c in ((3, 0.2), (2, 0.3), (1, 0.4)))
    config = H2OConfig(max_kv_size=64)
    found = {
        way: benchmark.configs(way, Profile("tiny", 1, layers), config) for way in benchmark.WAYS
    }
    assert {way: sum(c.max_kv_size for c in each) for way, each in found.items()} == dict.fromkeys(
        benchmark.WAYS, 3 * 64
    )
    assert found["uniform"] == [config] * 3
    assert len({c.heavy_size for c in found["by concentration"]}) == 3
    assert len({c.max_kv_size for c in found["by entropy"]}) == 3


def test_what_is_known_is_not_measured_again(benchmark, tmp_path):
    file = tmp_path / "result.json"
    assert benchmark._before(file, {"length": 3}) == {}
    file.write_text(json.dumps({"settings": {"length": 3}, "policies": {"h2o": 1}}))
    assert benchmark._before(file, {"length": 3}) == {"h2o": 1}
    assert benchmark._before(file, {"length": 4}) == {}


def test_the_committed_result_is_whole_and_supports_the_docs(benchmark):
    result = json.loads((FOLDER / "results" / "budgets.json").read_text())
    documents = result["settings"]["documents"]
    assert len(documents) >= 20 and "mlx_h2o.demo.text()" not in documents
    assert list(result["policies"]) == ["keydiff", "h2o"]
    for ways in result["policies"].values():
        assert tuple(ways) == benchmark.WAYS
        for runs in ways.values():
            for budget, run in runs.items():
                assert sum(run["rows"]) == int(budget) * len(result["layers"])
                assert {len(run[figure]) for figure in benchmark.FIGURES} == {len(documents)}
    # What docs/internals/measured.md concludes, from the same figures.
    found = benchmark.differences(result)
    assert found["keydiff"]["by concentration"]["recall_by_token"].high < 0
    assert found["h2o"]["by concentration"]["loss"].high < 0
    assert all(found[policy]["by entropy"]["loss"].low > 0 for policy in found)
