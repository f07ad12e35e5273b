"""The README and the documents: what they show is run, what they name exists."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_h2o
from mlx_h2o.cli import main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SESSIONS = {
    node.name: ast.get_docstring(node)
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.decorator_list
}
tables = runpy.run_path(str(ROOT / "tools" / "tables.py"))
# What a README command may start with besides those that are run here.
SET_UP = "python3 -m venv .venv && .venv/bin/pip install nox"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_readme_has_what_it_must() -> None:
    assert [len(blocks(language)) for language in ("sh", "python", "c", "swift")] == [3, 1, 1, 1]
    for language in ("python", "c", "swift"):
        assert len(blocks(language)[0].splitlines()) <= 12


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("python")
    source = (ROOT / "examples" / "python" / "generate.py").read_text()
    assert example in source
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    rows = re.fullmatch(r"4821 from (\d+) of 449 rows\n", printed)
    assert rows, printed
    assert 100 < int(rows[1]) <= 128


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "python").glob("*.py")), ids=str)
def test_python_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("language", "path"), [("c", "examples/c/attention.c"), ("swift", "examples/swift/main.swift")]
)
def test_compiled_examples_are_taken_from_their_files(language: str, path: str) -> None:
    (example,) = blocks(language)
    lines = iter(line.strip() for line in (ROOT / path).read_text().splitlines())
    for line in filter(None, map(str.strip, example.splitlines())):
        assert line in lines, f"{path} lacks, or has elsewhere: {line}"


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines()]


def test_every_command_is_known_here() -> None:
    for command in commands():
        last = command.removeprefix(f"{SET_UP} && ")
        if last.startswith(".venv/bin/nox"):
            assert last.split()[2] in SESSIONS, command
        else:
            assert last.startswith("mlx_h2o "), f"nothing tests the command {command!r}"
    assert commands()[0].startswith(SET_UP)


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("mlx_h2o ")])
def test_commands_of_the_package_run(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)[1:]) == 0
    assert len(capfd.readouterr().out.split()) > 10


def test_there_is_one_version() -> None:
    version = mlx_h2o.__version__
    for file, line in (
        ("pyproject.toml", f'version = "{version}"'),
        ("CITATION.cff", f"version: {version}"),
        ("docs/swift.md", f'.package(url: "<this repository>", from: "{version}")'),
    ):
        lines = map(str.strip, (ROOT / file).read_text(encoding="utf-8").splitlines())
        assert line in lines, f"{file} lacks: {line}"
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None and newest[1] == version


def test_sessions_have_one_line_docstrings() -> None:
    expected = {"lint", "types", "native", "tests", "parity", "swift", "sanitize", "demo", "docs"}
    assert expected <= SESSIONS.keys()
    for name, text in SESSIONS.items():
        assert text, name
        assert "\n" not in text, name


def test_measured_tables_are_the_committed_results() -> None:
    found = []
    for page in tables["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert tables["rewritten"](page, text) == text, f"{page.name}: run tools/tables.py"
        found += tables["shown"](text)
    assert sorted(found) == sorted([*tables["TABLES"], "nox -s models"])


def test_the_memory_numbers() -> None:
    """36 layers, 8 KV heads of 128, float16: Qwen3-8B."""
    row = mx.zeros((1, 8, 1, 128), dtype=mx.float16)
    cache = mlx_h2o.H2OKVCache(mlx_h2o.H2OConfig(max_kv_size=1, sink_size=0, policy="window"))
    cache.update_and_fetch(row, row)
    readme = " ".join(README.split())
    per_token = 36 * (cache.keys.nbytes + cache.values.nbytes)
    assert f"{per_token:,} bytes per token" in readme
    assert f"**{per_token * 32_768 / 1e9:.1f} GB**" in readme
    assert f"2048 rows it keeps {36 * cache.nbytes * 2048 / 1e9:.1f} GB" in readme


def test_every_document_is_on_the_map() -> None:
    pages = list((ROOT / "docs").glob("*.md"))
    assert len(pages) <= 9, "what is no page for users lies in docs/internals"
    for document in pages:
        assert f"](docs/{document.name})" in README
    assert "](docs/internals)" in README


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_file_map_is_complete() -> None:
    mapped = set(re.findall(r"^\| \[([a-z-]+)/\]", README, flags=re.MULTILINE))
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    folders = {line.split("/")[0] for line in tracked.stdout.splitlines() if "/" in line}
    assert {name for name in folders if not name.startswith(".")} == mapped
