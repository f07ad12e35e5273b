"""What is wrong on the command line is told in one line, in the names that were typed."""

from __future__ import annotations

import io
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from mlx_h2o import cli

GENERATE = ("generate", "--model", "demo", "--prompt", "a")
EVALUATE = ("evaluate", "--model", "demo")
TABLE = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text("ascii"))


def arguments_of(typed: str) -> tuple[str, ...]:
    command, *others = shlex.split(typed)
    whole = {"generate": GENERATE, "evaluate": EVALUATE}.get(command, (command,))
    return *whole, *map(here, others)


def here(text: str) -> str:
    return text.replace("{here}", __file__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (arguments_of(one), said.replace("{here}", __file__))
            for one, said in TABLE["mistakes"].items()
        ),
        ((*GENERATE, "--prompt", "\udcff"), "argument --prompt/-p: 'utf-8' codec can't encode"),
    ],
)
def test_a_mistake_is_a_line(arguments, message, refused):
    said = refused(*arguments)
    assert said.startswith(f"mlx_h2o {arguments[0]}: error: ")
    assert message in said and "[H2OConfig]" not in said and "usage" not in said


@pytest.mark.parametrize("typed", TABLE["out_of_range"])
def test_a_number_that_is_out_of_range(typed, refused):
    command, flag, value = typed.split()
    said = refused(*(GENERATE if command == "generate" else (command,)), flag, value)
    assert said.startswith(f"mlx_h2o {command}: error: argument ")
    assert re.search(rf"{flag}\S*: \S+ is out of range, expected", said)


@pytest.mark.parametrize("command", ["evaluate", "server"])
def test_an_empty_model_folder(command, tmp_path, refused):
    said = refused(command, "--model", tmp_path)
    assert f"{tmp_path} has no config.json, expected a model of mlx_lm" in said


def test_a_name_that_the_hub_does_not_give(monkeypatch, refused):
    def load(*args, **kwargs):
        raise FileNotFoundError("cannot find\nthe files")

    monkeypatch.setattr("mlx_lm.load", load)
    assert refused("generate", "--model", "none", "--prompt", "a") == (
        "mlx_h2o generate: none is not a directory, and could not be fetched from the hub: cannot "
        "find the files\n"
    )


def test_a_cache_that_cannot_be_written(tmp_path, capsys):
    file = tmp_path / "none" / "file.safetensors"
    arguments = ("cache_prompt", "--model", "demo", "--prompt", "a", "--prompt-cache-file")
    with pytest.raises(SystemExit) as ended:
        cli.main((*arguments, str(file)))
    found = capsys.readouterr()
    assert ended.value.code == 2 and not found.out  # nothing was read
    assert found.err.startswith("mlx_h2o cache_prompt: error: argument --prompt-cache-file: ")
    assert f"No such file or directory: '{file}'" in found.err and found.err.count("\n") == 1


@pytest.mark.parametrize(("flags", "message"), TABLE["unsuited"].items())
def test_what_does_not_go_with_the_model(flags, message, capsys):
    assert cli.main((*GENERATE, *flags.split())) == 2
    found = capsys.readouterr()
    assert found.err.startswith(f"mlx_h2o generate: {message}") and found.err.count("\n") == 1
    assert "Prompt:" not in found.out


def test_standard_input_that_is_no_text(monkeypatch, refused):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe text")))
    assert "--texts -: 'utf-8' codec can't decode" in refused(*EVALUATE, "--texts", "-")


def test_a_long_text_is_read_without_a_warning(capfd):
    import mlx_h2o

    tokenizer = mlx_h2o.load("demo")[1]
    assert len(tokenizer.encode("a word and another " * 2000)) > 4096
    assert "maximum" not in capfd.readouterr().err
