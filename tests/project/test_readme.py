"""The README and the documents: the code that they show runs, and what they name exists."""

import re
import runpy
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_h2o
import mlx_h2o.policies
from pages import DOCS, PAGES, ROOT, SESSIONS, blocks
from programs import ended

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAPPED = re.findall(r"^\| \[([a-z-]+)/\]", README, re.MULTILINE)
tables = runpy.run_path(str(ROOT / "tools" / "tables.py"))


def test_readme_has_what_it_must() -> None:
    found = {language: blocks(language, "README.md") for language in ("sh", "python", "c", "swift")}
    assert [len(some) for some in found.values()] == [4, 1, 1, 1]
    for language in ("python", "c", "swift"):
        assert len(found[language][0].text.splitlines()) <= 12
    set_up = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s demo\n"
    assert found["sh"][0].text == set_up


@pytest.mark.slow
def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = blocks("python", "README.md")[0].text
    assert example in (ROOT / "examples" / "python" / "generate.py").read_text()
    exec(compile(example, "README.md", "exec"), {})
    rows = re.fullmatch(r"4821 from (\d+) of 449 rows\n", printed := capsys.readouterr().out)
    assert rows and 50 < int(rows[1]) <= 128, printed


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "python").glob("*.py")), ids=str)
def test_python_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_there_is_one_version() -> None:
    version, unreleased = re.findall(r"(?m)^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text())[0]
    for file, line in (
        ("CITATION.cff", f"version: {version}"),
        ("docs/swift.md", f'.package(url: "<this repository>", from: "{version}")'),
    ):
        lines = map(str.strip, (ROOT / file).read_text(encoding="utf-8").splitlines())
        assert line in lines, f"{file} lacks: {line}"
    tags = ended("git", "tag", "--points-at", "HEAD", "v*", cwd=ROOT).stdout
    assert not tags or (tags.split(), unreleased) == ([f"v{version}"], "")


def test_sessions_have_one_line_docstrings() -> None:
    expected = {"lint", "types", "native", "tests", "parity", "swift", "sanitize", "demo", "docs"}
    assert expected <= SESSIONS.keys()
    for name, text in SESSIONS.items():
        assert re.fullmatch(".+", text or ""), name


def test_measured_tables_are_the_committed_results() -> None:
    found = []
    for page in tables["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert tables["rewritten"](page, text) == text, f"{page.name}: run tools/tables.py"
        found += tables["shown"](text)
    assert sorted(found) == sorted([*tables["TABLES"], *tables["COMPUTED"], "nox -s models"])


def test_the_memory_numbers() -> None:
    """36 layers, 8 KV heads of 128, float16: Qwen3-8B."""
    row = mx.zeros((1, 8, 1, 128), dtype=mx.float16)
    cache = mlx_h2o.H2OKVCache(mlx_h2o.H2OConfig.of(max_kv_size=1, sink_size=0, policy="window"))
    cache.update_and_fetch(row, row)
    readme = " ".join(README.split())
    per_token = 36 * (cache.keys.nbytes + cache.values.nbytes)
    assert f"{per_token:,} bytes per token" in readme
    assert f"**{per_token * 32_768 / 1e9:.1f} GB**" in readme
    assert f"2048 rows it keeps {36 * cache.nbytes * 2048 / 1e9:.1f} GB" in readme
    most, least = (sum(p.nbytes for p in mx.quantize(row, bits=bits)) // 8 for bits in (8, 2))
    assert f"| {most} ... {least} in float16 |" in (DOCS / "design.md").read_text("utf-8")


def test_every_document_is_on_the_map() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for document in DOCS.rglob("*.md"):
        name = document.relative_to(DOCS).as_posix()
        assert len(re.findall(rf"^ *- (?:Overview: )?{name}$", site, flags=re.MULTILINE)) == 1, name
        if "internals" not in name and name != "index.md":
            assert f"]({name})" in index, name
        if "/" not in name:
            assert f"](docs/{name})" in README, name
    assert "](docs/internals)" in README


@pytest.mark.parametrize("page", ["package", "fast", "policies"])
def test_the_reference_is_complete(page: str) -> None:
    module = getattr(mlx_h2o, page, mlx_h2o)
    text = (DOCS / "python" / f"{page}.md").read_text(encoding="utf-8")
    shown = re.findall(rf"^::: {re.escape(module.__name__)}\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(shown) == sorted({*module.__all__} - {"__version__", "fast"})


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_links_and_names_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https://)([^)#]+)(?:#[^)]*)?\)", text):
        assert (document.parent / target).exists(), f"{document.name}: {target}"
    for name in re.findall(rf"(?<![\w/.(-])((?:{'|'.join(MAPPED)})/[\w/.-]*+)(?![*<])", text):
        assert (ROOT / name.rstrip(".")).exists(), f"{document.name}: {name}"


def test_the_file_map_is_complete() -> None:
    tracked = ended("git", "ls-files", cwd=ROOT)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    folders = {line.split("/")[0] for line in tracked.stdout.splitlines() if "/" in line}
    assert {name for name in folders if not name.startswith(".")} == {*MAPPED}
