"""Mistakes on the command line are reported in one line, in the names that the user typed."""

import io
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from chat_families import FAMILIES, saved
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
    ("begins", "typed", "message"),
    [
        *(("error: ", *row) for row in TABLE["mistakes"].items()),
        *(("", *row) for row in TABLE["unsuited"].items()),
        ("error: ", "generate --prompt \udcff", "argument --prompt/-p: 'utf-8' codec can't encode"),
        ("error: ", "server --api-key \udcff", "argument --api-key: 'utf-8' codec can't encode"),
    ],
)
def test_a_mistake_is_a_line(begins, typed, message, refused):
    said = refused(*arguments_of(typed))
    assert said.startswith(f"mlx_h2o {typed.split()[0]}: {begins or message}")
    assert here(message) in said and "[H2OConfig]" not in said and "usage" not in said


def test_a_name_that_the_hub_does_not_give(monkeypatch, refused):
    def load(*args, **kwargs):
        raise FileNotFoundError("cannot find\nthe files")

    monkeypatch.setattr("mlx_lm.load", load)
    assert refused("generate", "--model", "none", "--prompt", "a") == (
        "mlx_h2o generate: none is not a directory, and could not be fetched from the hub: cannot "
        "find the files\n"
    )


def test_standard_input_that_is_no_text(monkeypatch, refused):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe text")))
    assert "--texts -: 'utf-8' codec can't decode" in refused(*EVALUATE, "--texts", "-")


def test_a_locale_that_lacks_a_character_of_an_answer(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written := io.BytesIO(), "ascii"))
    assert cli.ended("chat", lambda: print("a\u00b7b") or 0) == 0
    assert written.getvalue() == b"a?b\n"


def test_a_template_that_refuses_a_prompt_is_told(tmp_path, refused):
    family = replace(FAMILIES["qwen2.5"], template="{{ raise_exception('No ' ~ system) }}")
    common = ["--model", saved(family, tmp_path), "--prompt", "Rain?"]
    said = " the model's chat template refuses the prompt: "
    found = refused("generate", *common, "--chat-template-config", '{"system": "rain"}')
    assert found == f"mlx_h2o generate:{said}No rain\n"
    found = refused("generate", *common, "--chat-template-config", '{"conversation": "rain"}')
    assert said in found and "'conversation'" in found
    assert said in refused("cache_prompt", *common, "--prompt-cache-file", tmp_path / "file")


def test_a_long_text_is_read_without_a_warning(demo, capfd):
    assert len(demo[1].encode("a word and another " * 2000)) > 4096
    assert "maximum" not in capfd.readouterr().err
