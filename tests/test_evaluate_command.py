"""`mlx_h2o evaluate`: the table, the figures behind it, and what it refuses."""

from __future__ import annotations

import json

import pytest

from mlx_h2o import cli, demo


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(demo.text()[:2000], encoding="utf-8")
    return str(file)


def evaluated(text, *flags):
    return ["evaluate", "--model", "demo", "--text", text, "--length", "120", *flags]


def test_arms_are_compared_on_the_same_tokens(text, tmp_path, capsys):
    file = tmp_path / "found.json"
    sizes = ("--max-kv-size", "48", "--evict-every", "1")
    flags = (*sizes, "--policies", "keydiff", "window", "--json", str(file))
    assert cli.main(evaluated(text, *flags)) == 0
    shown = capsys.readouterr().out
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [arm["cache"] for arm in found] == ["full cache", "rotating", "keydiff", "window"]
    assert {len(arm["losses"]) for arm in found} == {120 - 48}
    full, rotating, keydiff, window = found
    assert f"{keydiff['perplexity']:.2f}" in shown
    # Sinks and the newest rows: the same rows as RotatingKVCache.
    assert window["perplexity"] == pytest.approx(rotating["perplexity"], rel=1e-3)
    assert keydiff["losses"] != window["losses"]
    assert window["kv_bytes"] < full["kv_bytes"] / 2


def test_quantised_rows_take_fewer_bytes(text, tmp_path):
    bytes_of = {}
    for bits in ("8", "4"):
        file = tmp_path / f"{bits}.json"
        flags = ("--max-kv-size", "48", "--kv-bits", bits, "--json", str(file))
        assert cli.main(evaluated(text, *flags)) == 0
        bytes_of[bits] = json.loads(file.read_text(encoding="utf-8"))[-1]["kv_bytes"]
    assert bytes_of["4"] < bytes_of["8"]


def test_mixed_precision_and_budgets(text, tmp_path):
    file, budgets = tmp_path / "found.json", tmp_path / "budgets.json"
    budgets.write_text(json.dumps({"budgets": [64, 48, 48, 48, 48, 32]}))
    flags = ("--max-kv-size", "48", "--evict-every", "1", "--json", str(file))
    found = {}
    for kind, more in {
        "8": "--kv-bits 8",
        "mixed": "--kv-bits 8 --light-bits 4 --dense-size 4",
        "budgets": f"--kv-bits 8 --budgets {budgets}",
    }.items():
        assert cli.main(evaluated(text, *flags, *more.split())) == 0
        found[kind] = json.loads(file.read_text(encoding="utf-8"))[-1]
    losses = [arm["losses"] for arm in found.values()]
    assert losses[0] != losses[1] != losses[2] != losses[0]
    bytes_of = {kind: arm["kv_bytes"] for kind, arm in found.items()}
    assert bytes_of["budgets"] == pytest.approx(bytes_of["8"], rel=1e-3)  # as many rows, elsewhere


def test_without_a_budget_rows_are_only_quantised(text, tmp_path):
    file = tmp_path / "found.json"
    flags = ("--max-kv-size", "none", "--kv-bits", "8", "--sparse-v", "1e-6", "--chunk", "48")
    assert cli.main(evaluated(text, *flags, "--json", str(file))) == 0
    full, ours = json.loads(file.read_text(encoding="utf-8"))
    assert (full["cache"], ours["cache"]) == ("full cache", "keydiff")
    assert ours["losses"] == pytest.approx(full["losses"], abs=0.2)
    assert ours["losses"] != full["losses"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-kv-size", "300"), "120 tokens, expected more than --max-kv-size = 300"),
        (("--text", "/no/such/file"), "--text: "),
        (("--sink-size", "999"), "sink_size"),
        (("--policies", "best"), "invalid choice"),
        (("--max-kv-size", "48", "--budgets", "/no/such/file"), "/no/such/file"),
        (("--max-kv-size", "none", "--chunk", "300"), "expected more than --chunk = 300"),
    ],
)
def test_mistakes_end_the_command(text, flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(evaluated(text, *flags))
    assert end.value.code == 2
    assert message in capsys.readouterr().err
