"""benchmarks/evict_every.py: what counts as a cost, and a small run of it."""

from __future__ import annotations

import json
import sys

import pytest

from benchmark_scripts import script


@pytest.fixture
def benchmark():
    with script("evict_every") as module:
        yield module


def figures(loss: float, recall: float) -> dict[str, list[float]]:
    """Of eight documents that differ from one another, but not in what a group costs."""
    return {
        "loss": [loss + 0.1 * document for document in range(8)],
        "recall_by_token": [recall] * 8,
        "recall_by_chunk": [recall] * 8,
    }


@pytest.mark.parametrize(
    ("loss", "recall", "free"),
    [(4.0, 0.5, True), (3.9, 0.75, True), (4.01, 0.5, False), (4.0, 0.25, False)],
)
def test_a_group_is_free_where_no_interval_shows_a_cost(benchmark, loss, recall, free):
    runs = {"64": {"1": figures(4.0, 0.5), "8": figures(loss, recall)}}
    assert benchmark.free(runs, "64", "8") is free


def test_the_table_leaves_out_what_was_not_measured(benchmark):
    runs = {
        "64": {"1": figures(4.0, 0.5), "2": figures(4.2, 0.25)},
        "128": {"1": figures(3.0, 0.5), "4": figures(3.0, 0.5)},
    }
    result = {"models": {"demo": {"policies": {"keydiff": runs}}}}
    lines = benchmark.table(result).splitlines()[2:]
    assert lines == [
        "| demo | `keydiff` | 1 | 4.350 | 50% | 50% | 3.350 | 50% | 50% |",
        "| demo | `keydiff` | 2 | 4.550+ | 25%- | 25%- |  |  |  |",
        "| demo | `keydiff` | 4 |  |  |  | 3.350 | 50% | 50% |",
    ]


@pytest.mark.exhaustive
def test_a_run_takes_the_default_group_along_and_goes_on_later(
    benchmark, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "found.json"
    flags = f"--documents 1 --length 120 --facts 1 --policies window --budgets 64 --json {file}"
    for groups in ("1", "8"):
        given = ["evict_every.py", *flags.split(), "--groups", groups]
        monkeypatch.setattr(sys, "argv", given)
        benchmark.main()
    found = json.loads(file.read_text())["models"]["demo"]["policies"]["window"]["64"]
    assert list(found) == ["1", "2", "8"]
    assert "demo, window, 64 rows: no cost shown for 1" in capsys.readouterr().out
