"""The command `mlx_h2o`."""

from __future__ import annotations

import io

import pytest

from mlx_h2o import cli, generate, load


@pytest.mark.slow
def test_the_command_generates(capsys):
    flags = (
        "--model demo --max-kv-size 32 --sink-size 2 --policy keydiff --evict-every 2 "
        "--layers equal --max-tokens 60 --ignore-chat-template --seed 1 --temp 0"
    )
    prompt = "The monster\\nlooked at me"
    assert cli.main(["generate", *flags.split(), "--prompt", prompt]) == 0
    printed = capsys.readouterr().out
    assert "Generation: 60 tokens" in printed
    last = printed.splitlines()[-1]
    assert last.startswith("KV cache: keydiff, 6 of 6 layers evict, 3")
    assert last.endswith(" bytes") and "evicted" in last


@pytest.mark.slow
def test_the_command_reads_standard_input_and_prints_only_the_text(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("It was a dark night"))
    flags = "--model demo -p - -m 20 --verbose False"
    assert cli.main(["generate", *flags.split()]) == 0
    expected = generate(*load("demo"), "It was a dark night", max_tokens=20)
    assert capsys.readouterr().out.strip() == expected.strip()


@pytest.mark.slow
def test_without_a_budget_nothing_is_evicted(capsys):
    """And a threshold that nothing is below leaves the text as it is."""
    texts = []
    for flags in ("", "--sparse-v 1e-9"):
        given = f"--model demo -p night -m 60 --temp 0 --max-kv-size none --kv-bits 8 {flags}"
        assert cli.main(["generate", *given.split()]) == 0
        text, _, figures = capsys.readouterr().out.partition("Prompt:")
        assert "KV cache: 0 of 6 layers evict, 6" in figures and " 0 evicted" in figures
        texts.append(text)
    assert texts[0] == texts[1]


def test_help_and_mistakes(capsys):
    assert cli.main(["sing"]) == 2
    assert "'sing' is not a command" in capsys.readouterr().err
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    assert "generate" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert ", back end " in capsys.readouterr().out
