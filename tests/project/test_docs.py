"""Every block of code on the pages is run, compiled or parsed; exceptions are listed."""

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from commands.test_server import serving
from mlx_h2o import cli, demo, fast
from mlx_h2o.commands import chat
from mlx_h2o.commands.options import settings_of
from mlx_h2o.serving.schema import ChatBody, CompletionBody
from pages import BLOCKS, COMMANDS, ROOT, SESSIONS, Block, blocks, blocks_of

LANGUAGES = {"python", "signature", "sh", "c", "cmake", "swift"}
NOT_RUN = {
    "docs/index.md": ["needs a chat model, and a person"],
    "docs/budget.md": ["the harness fetches its tasks"],
    "docs/machines.md": ["needs two Macs"],
    "docs/python.md": ["mlx-vlm is installed by nox -s vlm"],
    "docs/swift.md": [
        "a line of another package's manifest",
        "ChatSession is mlx-swift-lm's, which the package takes on Apple platforms only",
        "the registry is mlx-swift-lm's, which the package takes on Apple platforms only",
    ],
    "docs/internals/swift-upstream.md": 2 * ["a proposal, for the sources of another package"],
}
# Settings that are added to a command so that it takes seconds; everything else is as it is shown.
SMALLER = {"evaluate": "--tasks loss --documents 1 --length 64", "generate": "--max-tokens 8"}
SETTING_UP = ("python3 -m venv .venv", ".venv/bin/pre-commit install")


def test_every_block_is_of_a_language_that_is_tested() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert {block.language for block in BLOCKS if block.output is not None} <= {"python"}


def test_blocks_that_are_not_run_are_these() -> None:
    found: dict[str, list[str]] = {}
    for block in BLOCKS:
        if block.reason:
            found.setdefault(block.page, []).append(block.reason)
    assert found == NOT_RUN


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```\nls\n```\n", "no language"),
        ("A list:\n\n    ls\n", "indented"),
        ("```text\n1\n```\n", "the output of no block"),
        ("```python\n1\n```\n\nand\n\n```text\n1\n```\n", "the output of no block"),
    ],
)
def test_a_block_cannot_hide(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        blocks_of("page", text)


# Python


# The README's is run by test_readme.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    "page", dict.fromkeys(b.page for b in blocks("python") if b.page != "README.md")
)
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page, one after the other, in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": page}
    for block in blocks("python", page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, str(block), "exec"), namespace)
        if block.output is not None:
            assert comparable(printed.getvalue()) == comparable(block.output), str(block)


def comparable(printed: str) -> str:
    """Where rows have 16 bits, as on a GPU, numbers of bytes are others than in the documents."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return printed if on_cpu else re.sub(r"\d[\d,]*", "N", printed)


@pytest.mark.parametrize("block", blocks("signature"), ids=str)
def test_signatures_are_those_of_the_operations(block: Block) -> None:
    found = re.findall(r"^(\w+)(\(.*?\)) -> [^\n]*$", block.text, flags=re.DOTALL | re.MULTILINE)
    assert len(found) == block.text.count(" -> ")
    for name, shown in found:
        made: dict[str, Any] = {}
        exec(f"def {name}{shown}: ...", made)
        assert arguments(made[name]) == arguments(getattr(fast, name)), name


def arguments(function: Any) -> list[tuple[Any, ...]]:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


def test_messages_that_are_explained_are_messages_of_ours() -> None:
    page = (ROOT / "docs" / "index.md").read_text("utf-8")
    rows = re.findall(r"^\| (`[^|]*) \|", page.partition("## Errors")[2], re.MULTILINE)
    explained = [text for row in rows for text in re.findall("`([^`]+)`", row)]
    said = {
        node.value
        for file in (ROOT / "python").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert len(explained) > 8
    for text in explained:
        assert any(text in one for one in said), text


# Commands


def test_every_program_is_known_here() -> None:
    options, project = ((ROOT / n).read_text("utf-8") for n in ("CMakeLists.txt", "pyproject.toml"))
    for block, words in COMMANDS:
        command, program = " ".join(words), Path(words[0]).name
        if program == "nox":
            named = words[words.index("-s") + 1 :] if "-s" in words else []
            assert {*named} <= SESSIONS.keys(), f"{block}: {command}"
        elif program == "cmake":
            for name in re.findall(r"-D(\w+)=", command):
                assert name.startswith("CMAKE_") or name in options, command
        elif program == "pip":
            for name in words[2:]:
                package, _, extra = name.rstrip("]").partition("[")
                assert package in (".", "nox", "pre-commit"), name
                assert not extra or f"\n{extra} = [" in project, name
        elif program == "swift":
            product = words[words.index("run") + 1]
            assert f'name: "{product}"' in (ROOT / "Package.swift").read_text("utf-8")
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), f"{block}: {command}"
        elif program.startswith("mlx."):  # MLX's own
            assert program in ("mlx.launch", "mlx.distributed_config"), f"{block}: {command}"
        elif program not in ("mlx_h2o", "curl"):
            assert command in SETTING_UP, f"{block}: nothing tests {command!r}"


OF_PACKAGE = [
    (block, words[1:])
    for block, words in COMMANDS
    if words[0] == "mlx_h2o" and words[1] != "server" and not block.reason
]
"""Commands of the package that end by themselves."""


@pytest.mark.slow
@pytest.mark.parametrize("page", dict.fromkeys(block.page for block, _ in OF_PACKAGE))
def test_commands_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The commands of a page, one after the other, in a folder with a book."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(demo.text(), encoding="utf-8")
    for block, words in [one for one in OF_PACKAGE if one[0].page == page]:
        status = cli.main([*words, *SMALLER.get(words[0], "").split()])
        said = capfd.readouterr()
        assert status == 0, f"{block}: {said.err}"
        assert len(said.out.split()) > 5, f"{block}: {words}"


def test_the_fields_of_requests_are_those_that_are_listed() -> None:
    page = (ROOT / "docs" / "server.md").read_text("utf-8").partition("## Request fields")[2]
    parts = page.partition("Everything else")[0].split("for chats also")
    alike, chats = ({*re.findall(r"`(\w+)`", part)} for part in parts)
    known = [{*body.model_json_schema()["properties"]} for body in (CompletionBody, ChatBody)]
    assert alike == known[0] - {"prompt"}
    assert chats == known[1] - known[0] - {"messages"} | {"auto", "none"}


def test_a_conversation_is_understood() -> None:
    (words,) = (words for _, words in COMMANDS if words[:2] == ["mlx_h2o", "chat"])
    parser = chat.parser()
    asked = settings_of(parser, parser.parse_args(words[2:]))
    assert asked.given == {"max_kv_bytes": 300_000_000}


@pytest.mark.slow
@pytest.mark.downstream
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_server_answers(tmp_path: Path) -> None:
    """One with the flags of all that are shown, the request that is shown."""
    shown_flags = [words[2:] for _, words in COMMANDS if words[:2] == ["mlx_h2o", "server"]]
    assert all(words[:2] == ["--model", "demo"] for words in shown_flags)
    flags = [word for words in shown_flags for word in words[2:]]
    (curl,) = (words for _, words in COMMANDS if words[0] == "curl")
    where, data = curl[1], curl[curl.index("-d") + 1]
    at = flags.index("--port")
    _, shown = flags.pop(at), flags.pop(at)
    assert where.startswith(f"http://127.0.0.1:{shown}/")
    said = " ".join(flags).replace("~", str(tmp_path))
    with serving(tmp_path, said) as server:
        asked = [one.replace(f":{shown}/", f":{server.port}/") for one in curl]
        answer = json.loads(subprocess.check_output(asked, timeout=60))
    assert answer["usage"]["completion_tokens"] == json.loads(data)["max_tokens"]
    assert (tmp_path / ".cache" / "prompts").is_dir()
