"""Which positions a run held, and the page that shows it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import cli, routing
from mlx_h2o.evaluation import held, output, tasks
from mlx_h2o.evaluation.arms import Footprint, resolve
from mlx_h2o.evaluation.front import _front, _Point, _sizes, _ticks
from mlx_h2o.evaluation.run import MEASUREMENTS, evaluate
from mlx_h2o.evaluation.strategies import parse
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
LENGTH, PROMPT = 110, 8
TEXT = " ".join(f"t{token}" for token in random_prompt(230))


@pytest.fixture(scope="module")
def loaded():
    return tiny_qwen3(head_dim=32), tiny_tokenizer()


@pytest.fixture(scope="module")
def run(loaded, tmp_path_factory):
    """A folder, and what was measured."""
    folder = tmp_path_factory.mktemp("run")
    settings = tasks.Settings(
        documents=2, length=LENGTH, prompt=PROMPT, chunk=16, seeds=1, needles=(2,),
        wordings=("secret",), depths=(0.5,),
    )  # fmt: skip
    found = evaluate(
        *loaded, [("<text>", TEXT)], [parse(text) for text in ("keydiff:32", "h2o:24", "full")],
        settings=settings, tasks=tasks.TASKS, controls=False, folder=folder, model_name="tiny",
    )  # fmt: skip
    output.write(folder, found, "mlx_h2o evaluate")
    return folder, json.loads((folder / "results.json").read_text())


# What is recorded


def test_runs_of_digits():
    chance = np.random.default_rng(0)
    digits = np.repeat(chance.integers(0, 10, 60), chance.integers(1, 20, 60)).astype(float)
    packed = held._packed(digits)
    assert held.expanded(packed) == "".join(f"{digit:.0f}" for digit in digits)
    assert len(packed) < len(digits)


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["keydiff:32", "h2o:24"])
def test_what_is_recorded_is_what_caches_hold(loaded, run, name):
    model, tokenizer = loaded
    recorded = run[1]["recorded"]["ppl"]["held"][name]
    caches = resolve(Footprint(model), parse(name), LENGTH).make(0)
    tokens = tokenizer.encode(TEXT)[: LENGTH - 1]  # the last is predicted, not read
    with routing(model):
        for start in (0, *range(PROMPT, len(tokens))):
            model(mx.array([tokens[start : start + 1] if start else tokens[:PROMPT]]), cache=caches)
    assert recorded["moments"][0] == PROMPT + 1 and len(recorded["moments"]) <= held.MOMENTS
    for cache, layer in zip(caches, recorded["layers"], strict=True):
        positions = np.array(cache.positions)[0]
        expected = [np.ceil(9 * (positions == place).any(axis=1).mean()) for place in range(LENGTH)]
        assert list(map(int, held.expanded(layer["end"]))) == expected
        assert layer["rows"] == positions.shape[1]
        ranges = -(-LENGTH // recorded["width"])
        at_moments = held.expanded(layer["map"])
        assert len(at_moments) == ranges * len(recorded["moments"])
        if name == "h2o:24":
            rows = np.exp(np.array(cache.scores))
            assert rows.sum() == pytest.approx(2 * len(tokens), rel=1e-4)  # of two heads
            means = [rows[0][positions == place].mean() if (positions == place).any() else 1
                     for place in range(LENGTH)]  # fmt: skip
            powers = held.expanded(layer["end_folded"])
            assert list(map(int, powers)) == np.floor(np.log2(means) + 1e-6).astype(int).tolist()
            assert max(powers) > "1"
        else:
            assert "end_folded" not in layer


@pytest.mark.slow
def test_only_what_lets_rows_go_and_only_where_it_is_asked_for(loaded, run):
    recorded = run[1]["recorded"]
    assert list(recorded) == [task for task in tasks.TASKS if task != "skips"]
    for text in recorded.values():
        assert list(text["held"]) == ["keydiff:32", "h2o:24"]
        assert "".join(text["pieces"]).startswith(TEXT[:8])
    facts = recorded["needle"]["facts"]
    assert len(facts) == 2 and all(fact in "".join(recorded["needle"]["pieces"]) for fact in facts)
    quiet = evaluate(
        *loaded, [("text", TEXT)], [parse("keydiff:32")], controls=False, record=False,
        settings=tasks.Settings(documents=1, length=40, prompt=8, seeds=1),
    )  # fmt: skip
    assert quiet.texts == {} and "held" not in quiet.records[0]


def test_characters_of_several_tokens():
    class Bytes:
        def decode(self, tokens):
            return bytes(tokens).decode("utf-8", errors="replace")

    text = "naïve 日本語, " * 9
    found = held.pieces(Bytes(), text.encode())
    assert "".join(found) == text and len(found) == len(text.encode())
    assert found[2:4] == ["", "ï"]


# The page


class _Page(HTMLParser):
    """Tags, what they point to, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.said: list[str] = []
        self.data = ""
        self._in_data = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.links += [given[name] for name in ("src", "href") if name in given]
        self._in_data = given.get("id") == "recorded"
        if tag not in ("meta", "circle", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        self._in_data = False
        if tag not in ("circle", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)
        if self._in_data:
            self.data += data


@pytest.mark.slow
def test_the_page_of_a_run(run):
    folder, result = run
    assert cli.main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    found = _Page(text)
    assert found.open == [] and found.links == []
    assert json.loads(found.data) == result["recorded"]
    assert "from <text>" in "".join(found.said)  # as text, not as a tag
    for arm in result["strategies"]:
        assert f"<td>{arm['name']}</td>" in text
        assert f"<title>{arm['name']}: {arm['bytes']:,} bytes" in text
    assert not re.search(r"https?://|url\(|@import", text)


@pytest.mark.parametrize("name", ["quality_demo.json", "quality_llama.json"])
def test_a_result_without_a_recording(name, tmp_path, capsys):
    written = tmp_path / "page.html"
    assert cli.main(["report", str(RESULTS / name), "--output", str(written)]) == 0
    assert str(written) in capsys.readouterr().out
    text = written.read_text(encoding="utf-8")
    assert _Page(text).open == [] and "was not recorded" in text
    assert "<svg" in text and not re.search("(?i)(?<![a-z])nan", text)  # but Conan


def test_the_front_is_what_nothing_smaller_is_better_than():
    def point(name, nbytes, y):
        return _Point(name, nbytes, y, 0, 0, False, "")

    points = [point("a", 9, 0.1), point("b", 3, 0.5), point("c", 5, 0.6), point("d", 5, 0.2),
              point("e", 12, 0.1)]  # fmt: skip
    assert [one.name for one in _front(points, most=False)] == ["b", "d", "a"]
    assert [one.name for one in _front(points, most=True)] == ["b", "c"]


@pytest.mark.parametrize(("low", "high"), [(1, 9), (99, 101), (4e4, 3e6), (2, 5e9)])
def test_axes_have_a_few_round_numbers(low, high):
    assert len(_sizes(low, high)) <= 12
    ticks = _ticks(low, high)
    assert 3 <= len(ticks) <= 7 and low <= min(ticks) and max(ticks) <= high


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "results.json does not exist, expected what mlx_h2o evaluate --output wrote"),
        ({MEASUREMENTS: "{}"}, "is unfinished: the command of mlx_h2o evaluate that began it"),
        ({"results.json": "{"}, "is no JSON"),
        ({"results.json": "[]"}, "is no result of mlx_h2o evaluate: it has no 'command'"),
        (
            {"results.json": '{"command": ""}'},
            "is no result of mlx_h2o evaluate: it has no 'model'",
        ),
    ],
)
def test_what_is_no_run_is_said_in_one_line(files, message, tmp_path, capsys):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(tmp_path)])
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.count("\n") == 1
    assert line.startswith("mlx_h2o report: error: ") and message in line
    assert not (tmp_path / "report.html").exists()
