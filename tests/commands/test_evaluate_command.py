"""`mlx_h2o evaluate`: files, messages about progress, and what it refuses."""

import errno
import json
import re
from functools import partial
from unittest.mock import Mock

import pytest

from mlx_h2o import cli, demo
from mlx_h2o.commands import evaluate


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(demo.text()[:2000], encoding="utf-8")
    return str(file)


def evaluated(text, *flags):
    given = ("--texts", text, "--length", "44", "--documents", "1")
    return ["evaluate", "--model", "demo", *given, *flags]


@pytest.mark.slow
def test_it_says_what_goes_on_and_writes_what_it_found(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "Watch", partial(evaluate.Watch, 0.0))
    file, picture = tmp_path / "found.json", tmp_path / "loss.html"
    arms = ("--arms", "full", "mine: policy=window max_kv_size=16", "--output", str(file))
    pytest.importorskip("altair")
    assert cli.main(evaluated(text, *arms, "--plot", str(picture))) == 0
    said = capsys.readouterr()
    assert re.search(r"\| mine +\| +\+", said.out) and "Bytes are those of all layers" in said.out
    assert "loss 44, mine: 12 of 12" in said.err
    assert [one["arm"] for one in json.loads(file.read_text())["records"]] == ["full", "mine"]
    assert picture.read_text().count("mine")
    assert cli.main(evaluated(text, *arms)) == 0
    assert "12 of 12" not in capsys.readouterr().err


@pytest.mark.slow
def test_the_text_of_the_package_is_enough(capsys):
    assert cli.main(["evaluate", "--model", "demo", "--arms", "full"]) == 0
    assert "\n| 1.00 " in capsys.readouterr().out


def test_a_reader_that_goes_away_ends_it_quietly(text, monkeypatch, capfd):
    gone = Mock(side_effect=BrokenPipeError(errno.EPIPE, "Broken pipe"))
    monkeypatch.setattr(evaluate, "evaluate", gone)
    assert cli.main(evaluated(text)) == 1
    assert "Broken" not in capfd.readouterr().err


@pytest.mark.slow
def test_an_interruption_says_how_to_go_on(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "evaluate", Mock(side_effect=KeyboardInterrupt))
    file = tmp_path / "found.json"
    for kept in ("", f"; run the same command again to resume from {file}"):
        assert cli.main(evaluated(text, "--output", str(file))) == 130
        assert capsys.readouterr().err == f"mlx_h2o evaluate: interrupted{kept}\n"
        file.write_text("")
