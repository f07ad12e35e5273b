"""`mlx_h2o evaluate`: strategies and the flags that stand for them, files, and what it refuses."""

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
    given = ("--text", text, "--length", "44", "--documents", "1", "--prompt", "8")
    return ["evaluate", "--model", "demo", *given, *flags]


def figures(text, tmp_path, *flags):
    """By strategy: bytes, and the mean loss."""
    file = tmp_path / "found.json"
    assert cli.main(evaluated(text, "--json", str(file), *flags)) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    losses = {one["strategy"]: one["value"] for one in found["summary"] if one["measure"] == "loss"}
    return {one["name"]: (one["bytes"], losses[one["name"]]) for one in found["strategies"]}


@pytest.mark.slow
def test_flags_of_a_cache_stand_for_strategies(text, tmp_path, capsys):
    sizes = ("--max-kv-size", "32", "--evict-every", "1", "--no-controls")
    found = figures(text, tmp_path, *sizes, "--policies", "keydiff", "window")
    assert list(found) == ["full", "rotating:32", "keydiff:32:every=1", "window:32:every=1"]
    # Sinks and the newest rows: the same rows as RotatingKVCache.
    assert found["window:32:every=1"][1] == pytest.approx(found["rotating:32"][1], rel=1e-3)
    assert found["keydiff:32:every=1"][1] != found["window:32:every=1"][1]
    assert "keydiff:32:every=1" in capsys.readouterr().out
    written = figures(text, tmp_path, "--no-controls", "--strategies", *found)
    assert written == found


@pytest.mark.slow
def test_quantised_rows_mixed_precision_and_budgets(text, tmp_path):
    budgets = tmp_path / "budgets.json"
    budgets.write_text(json.dumps({"budgets": [40, 32, 32, 32, 32, 24]}))
    found = figures(
        text, tmp_path, "--no-controls", "--strategies", "keydiff:32:kv8", "keydiff:32:kv4",
        "keydiff:32:kv8:light=4:dense=4", f"keydiff:32:kv8:budgets={budgets}", "keydiff:none:kv8",
    )  # fmt: skip
    dense, fewer, mixed, shared, _ = found.values()
    assert fewer[0] < mixed[0] < dense[0]
    assert shared[0] == pytest.approx(dense[0], rel=1e-2)  # as many rows, elsewhere
    assert len({loss for _, loss in found.values()}) == 5
    by_flags = figures(
        text, tmp_path, "--no-controls", "--max-kv-size", "32", "--kv-bits", "8",
        "--budgets", str(budgets),
    )  # fmt: skip
    assert list(by_flags.values())[-1] == shared


@pytest.mark.slow
def test_a_folder_is_gone_on_with(text, tmp_path, capsys):
    folder = tmp_path / "found"
    flags = ("--strategies", "keydiff:32", "--no-controls", "--output", str(folder))
    for _ in range(2):
        assert cli.main(evaluated(text, *flags)) == 0
        names = {file.name for file in folder.iterdir()} - {"quality.png"}
        assert names == {"results.json", "results.csv", "results.md", "measurements.jsonl"}
    assert "results.md" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(evaluated(text, *flags, "--chunk", "7"))
    assert "another settings" in capsys.readouterr().err


@pytest.mark.slow
def test_files_are_called_by_their_names(text, tmp_path, capsys):
    names = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "budgets.json"
        file.write_text(json.dumps({"budgets": [40, 32, 32, 32, 32, 24]}))
        names.append(f"keydiff:32:budgets={file}")
    found = figures(text, tmp_path, "--no-controls", "--strategies", names[0])
    assert list(found) == ["keydiff:32:budgets=budgets.json"]
    with pytest.raises(SystemExit):
        cli.main(evaluated(text, "--no-controls", "--strategies", *names))
    assert "two strategies are called keydiff:32:budgets=budgets.json" in one_line(capsys)


def one_line(capsys):
    line = capsys.readouterr().err
    assert line.startswith("mlx_h2o evaluate: error: ") and line.count("\n") == 1
    return line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--text", "/no/such/file"), "--text /no/such/file: No such file"),
        (("--strategies", "best"), "'best' is unknown, expected one of: full"),
        (("--strategies", "keydiff:bytes=10"), "bytes is 10, expected at least"),
        (("--strategies", "keydiff:32", "--kv-bits", "4"), "--strategies with --kv-bits"),
        (("--sink-size", "999"), "--sink-size is 999"),
        (("--policies", "best"), "invalid choice"),
        (("--max-kv-size", "48", "--budgets", "/no/such/file"), "/no/such/file"),
        (("--length", "5"), "length is 5"),
        (("--seeds", "0"), "seeds is 0"),
        (("--tasks", "needle", "--depths", "2"), "a depth is 2"),
        (("--tasks", "needle", "--lengths", "9000"), "expected 9000"),
        (("--tasks", "needle", "--needles", "20"), "do not fit"),
        (("--model", "/no/such/model"), "/no/such/model"),
    ],
)
def test_mistakes_end_the_command(text, flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(evaluated(text, *flags))
    assert end.value.code == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "text.txt is empty"), (b"One word", "tokens, expected at least"), (b"\xff", "utf-8")],
)
def test_texts_that_are_none(tmp_path, content, message, capsys):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(SystemExit) as end:
        cli.main(evaluated(str(file)))
    assert end.value.code == 2
    assert message in one_line(capsys)
