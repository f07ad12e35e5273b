"""The command `mlx_h2o`."""

from __future__ import annotations

import io
import re

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
@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "flags",
    [
        "--kv-bits 8",
        "--kv-bits 8 --v-bits 4 --kv-group-size 32",
        "--kv-format turbo3",
        "--kv-format turbo8v4",
    ],
)
def test_the_command_quantises(flags, capsys):
    flags = f"--model demo -p night -m 40 --max-kv-size 32 --policy keydiff {flags}"
    assert cli.main(["generate", *flags.split()]) == 0
    printed = capsys.readouterr().out
    dense = "--model demo -p night -m 40 --max-kv-size 32 --policy keydiff"
    assert cli.main(["generate", *dense.split()]) == 0
    found, expected = (
        int(re.search(r"([\d,]+) bytes", text).group(1).replace(",", ""))
        for text in (printed, capsys.readouterr().out)
    )
    assert found < expected / 2


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


@pytest.mark.slow
def test_sparse_v_reaches_attention(capsys):
    """A threshold that drops most of the values changes what is said."""
    for size in ("none", "32"):
        texts = []
        for flags in ("", "--sparse-v 0.2"):
            given = f"--model demo -p night -m 40 --temp 0 --max-kv-size {size} --kv-bits 8 {flags}"
            assert cli.main(["generate", *given.split(), "--verbose", "False"]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] != texts[1]


def test_help_says_what_quantized_kv_start_does_here(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help-all"])
    said = " ".join(capsys.readouterr().out.split())
    assert "only 0: all rows are quantised, from the first" in said


def test_help_and_mistakes(capsys):
    assert cli.main(["sing"]) == 2
    assert "'sing' is not a command" in capsys.readouterr().err
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    assert "generate" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert ", back end " in capsys.readouterr().out
