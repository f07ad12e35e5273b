"""What commands print while they work: lines in a log, a bar in a terminal."""

import io
from itertools import count

import mlx.core as mx
import numpy as np

from mlx_h2o import cli, make_prompt_cache, routing
from mlx_h2o.commands import watch
from mlx_h2o.lm.generate import read_prompt
from tiny_models import random_prompt, tiny_qwen3


def test_a_log_has_a_line_every_few_seconds(monkeypatch, capsys):
    """Many short pieces of work are shown too, but nothing that is soon done."""
    now = iter([0.0, 0.0, 4.0, 6.0, 8.0, 11.5, 12.0, 20.0, 22.0])
    monkeypatch.setattr(watch.time, "monotonic", lambda: next(now))
    with watch.Watch() as say:
        for done in range(6):
            say("reading", done, 5)
        say("another", 0, 0)
        say("another", 5, 5)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 2 of 5, 6 s", "reading: 4 of 5, 12 s", "another: sizing its caches"
    ]  # fmt: skip


def test_a_log_shows_that_an_answer_is_written(monkeypatch, capsys):
    monkeypatch.setattr(watch.time, "monotonic", count(0, 9).__next__)
    flags = "generate --model demo --layers equal --prompt ship --max-tokens 3 --verbose false"
    assert cli.main(flags.split()) == 0
    said = capsys.readouterr()
    assert "writing: 2 of 3, " in said.err and said.out.strip()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_that_goes(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with watch.Watch() as say:
        say("reading [x]", 0, 500)
        say("reading [x]", 250, 500)
    shown = terminal.getvalue()
    assert "reading [x]" in shown and "250/500" in shown
    assert shown.endswith("\x1b[2K")  # the line is empty again


def test_a_prompt_that_is_read_is_in_the_caches():
    model, tokens, told = tiny_qwen3(), random_prompt(50), []
    caches, whole = (make_prompt_cache(model, 64, layers="equal") for _ in range(2))
    read_prompt(model, caches, tokens, 16, lambda done, total: told.append((done, total)))
    assert told == [(0, 50), (16, 50), (32, 50), (48, 50), (49, 50), (50, 50)]
    with routing(model):
        mx.eval(model(mx.array([tokens]), cache=whole))
        outs = [model(mx.array([[5]]), cache=one) for one in (caches, whole)]
    assert {cache.offset for cache in caches} == {51}
    np.testing.assert_allclose(np.array(outs[0]), np.array(outs[1]), atol=1e-4)
