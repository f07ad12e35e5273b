"""benchmarks/shares.py: the arms hold as many rows, and what is said of them."""

from __future__ import annotations

import pytest

from benchmark_scripts import script
from test_profile import FAR, NEAR, profile_of


@pytest.fixture(scope="module")
def benchmark():
    with script("shares") as module:
        yield module


def test_every_arm_holds_the_same_rows(benchmark):
    found = benchmark.settings(profile_of(NEAR, FAR, NEAR, policy="merge"), 40)
    assert list(found) == ["window", "merge", "merge, by layer"]
    assert {sum(c.max_kv_size for c in layers) for layers in found.values()} == {120}
    assert [c.max_kv_size for c in found["merge, by layer"]] == [10, 100, 10]
    assert {c.policy for c in found["window"]} == {"window"}


def test_what_is_said_of_a_result(benchmark):
    def arm(loss, recall):
        of = {"loss": loss, "recall_by_token": recall, "recall_by_chunk": recall}
        return {"64": of}

    result = {
        "full": {"loss": {"64": [1.0, 2.0, 3.0]}},
        "policies": {
            "window": arm([1.4, 2.4, 3.4], [0, 0, 0]),
            "merge": arm([1.3, 2.2, 3.4], [0.5, 0, 0]),
            "merge, by layer": arm([1.1, 2.1, 3.1], [1, 1, 0.75]),
        },
    }
    assert benchmark.lost(result, "merge, by layer", "64") == pytest.approx(0.25)
    found = benchmark.differences(result)["64"]
    assert found["loss"].mean == pytest.approx(-0.2) and found["loss"].high < 0
    assert found["recall_by_token"].low > 0
