"""benchmarks/seed_tables.py: changes are relative to what each source compares with."""

import math

SCRIPT = "seed_tables"


def records(benchmark, name, losses):
    arms = [row.arm.name for row in benchmark.TABLES[name].rows]
    pairs = zip(arms, losses, strict=True)
    return {"records": [{"arm": arm, "figures": {"loss": [x, x]}} for arm, x in pairs]}


def test_changes_are_of_the_full_caches_perplexity(benchmark):
    result = records(benchmark, "3", [1, 1.1, 1.05, 1.02])
    full, window, *_, heavy = benchmark.rows_of("3", result)
    assert full[1:] == ["512", "full", f"{math.e:.2f}", "-", "-"]
    assert window[2:] == ["window, 256 rows", f"{math.exp(1.1):.2f}", "+10.5 %", "+2.7 %"]
    assert heavy[2] == "h2o-ema, 256 rows, 128 heavy" and heavy[-1] == "+0.9 %"


def test_thresholds_are_compared_with_none_at_the_same_bits(benchmark):
    result = records(benchmark, "sparse-v", [1, 1, 1, 1, 1, 1, 2, 2.01, 2, 2, 2, 2])
    rows = benchmark.rows_of("sparse-v", result)
    assert [row[-2] for row in rows] == ["-", *["+0.0 %"] * 5, "-", "+1.0 %", *["+0.0 %"] * 4]


def test_a_table_without_its_figures_is_empty(benchmark):
    assert benchmark.rows_of("3", {"records": [{"arm": "full", "refused": "why"}]}) == []
