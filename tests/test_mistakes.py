"""What is wrong on the command line is told in one line, in the names that were typed."""

from __future__ import annotations

import io

import pytest

from mlx_h2o import cli

GENERATE = ("generate", "--model", "demo", "--prompt", "a")
EVALUATE = ("evaluate", "--model", "demo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GENERATE, "--max-kv-size", "-5"), "--max-kv-size is -5, expected"),
        ((*GENERATE, "--max-kv-size", "64", "--kv-bits", "7"), "--kv-bits"),
        ((*GENERATE, "--max-kv-size", "8", "--light-bits", "4"), "--light-bits is 4 and --kv-bits"),
        ((*GENERATE, "--seed", "-1"), "argument --seed: -1 is no seed, expected 0 to 2^64 - 1"),
        ((*GENERATE, "--seed", str(2**64)), "is no seed"),
        (("chat", "--model", "demo", "--seed", "x"), "argument --seed: invalid"),
        ((*GENERATE, "--max-token", "3", "--nosuch"), "unrecognized arguments: --nosuch"),
        (("server", "--model", "demo", "--port", "x"), "argument --port: invalid int value: 'x'"),
        ((*EVALUATE, "--output", "/no/such/folder/file"), "/no/such/folder/file"),
        (("evaluate", "--model", "/no/such/folder"), "/no/such/folder is not a directory"),
        (("server", "--model", "/no/such/folder"), "/no/such/folder is not a directory"),
        (("server", "--draft-model", "./none"), "./none is not a directory"),
        ((*GENERATE, "--max-kv-sise", "5"), "unrecognized arguments: --max-kv-sise 5"),
        (("server", "--model", "demo", "--prot", "80"), "unrecognized arguments: --prot 80"),
        (("cache_prompt", "--model", "demo", "--prompt", "a"), "required: --prompt-cache-file"),
        (("benchmark", "--max-kv-size", "a"), "'a' is not a number of rows, expected one, or none"),
        (("evaluate", "--model", "demo", "--texts", "/none"), "--texts /none: No such file"),
        ((*GENERATE, "--draft-model", "demo", "--num-draft-tokens", "0"), "expected at least 1"),
        (("server", "--cache-dir", "a", "--cache-size", "big"), "--cache-size: 'big' is no number"),
        (("layers", "--output", "file"), "the following arguments are required: --model"),
    ],
)
def test_a_mistake_is_a_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mlx_h2o {arguments[0]}: error: ") and said.count("\n") == 1
    assert message in said and "[H2OConfig]" not in said and "usage" not in said


@pytest.mark.parametrize("command", ["evaluate", "server"])
def test_an_empty_model_folder(command, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main((command, "--model", str(tmp_path)))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert f"{tmp_path} has no config.json, expected a model of mlx_lm" in said


def test_a_name_that_the_hub_does_not_give(monkeypatch, capsys):
    def load(*args, **kwargs):
        raise FileNotFoundError("cannot find\nthe files")

    monkeypatch.setattr("mlx_lm.load", load)
    assert cli.main(("generate", "--model", "none", "--prompt", "a")) == 2
    assert capsys.readouterr().err == (
        "mlx_h2o generate: none is not a directory, and could not be fetched from the hub: cannot "
        "find the files\n"
    )


def test_a_cache_that_cannot_be_written(tmp_path, capsys):
    file = tmp_path / "none" / "file.safetensors"
    arguments = ("cache_prompt", "--model", "demo", "--prompt", "a", "--prompt-cache-file")
    assert cli.main((*arguments, str(file))) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("mlx_h2o cache_prompt: ") and "No such file or directory" in said


def test_the_end_of_the_input_ends_a_chat(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert cli.main(("chat", "--model", "demo")) == 0


def test_standard_input_that_is_no_text(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe text")))
    with pytest.raises(SystemExit) as ended:
        cli.main((*EVALUATE, "--texts", "-"))
    assert ended.value.code == 2
    assert "--texts -: 'utf-8' codec can't decode" in capsys.readouterr().err


def test_a_long_text_is_read_without_a_warning(capfd):
    import mlx_h2o

    tokenizer = mlx_h2o.load("demo")[1]
    assert len(tokenizer.encode("a word and another " * 2000)) > 4096
    assert "maximum" not in capfd.readouterr().err
