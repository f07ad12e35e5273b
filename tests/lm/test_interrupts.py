"""Interruptions leave nothing behind: Ctrl-C, or a reader or client that goes away."""

import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import mlx.core as mx
import pytest

import mlx_h2o
from commands.test_commands import TEXT, chat_model
from mlx_h2o.commands import chat
from routing_checks import everything_of_mlx_lm

pytestmark = pytest.mark.downstream

SETTINGS = {"max_kv_size": 32, "policy": "h2o-ema"}


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell's background jobs ignore Ctrl-C, and so would pytest there, and what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(after: int):
    """A sampler behind which Ctrl-C is pressed at its call of this number."""
    calls = 0

    def sample(logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == after:
            signal.raise_signal(signal.SIGINT)
        return mx.argmax(logits, axis=-1)

    return sample


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 9])
def test_ctrl_c_in_generate_leaves_mlx_lm_as_it_was(after):
    model, tokenizer = mlx_h2o.load("demo")
    before = everything_of_mlx_lm()
    expected = mlx_h2o.generate(model, tokenizer, TEXT, max_tokens=12, **SETTINGS)
    cache = mlx_h2o.make_prompt_cache(model, **SETTINGS)
    given = {"max_tokens": 12, "prompt_cache": cache, "sampler": interrupting(after)}
    with pytest.raises(KeyboardInterrupt):
        mlx_h2o.generate(model, tokenizer, TEXT, **given)
    assert everything_of_mlx_lm() == before
    # The cache holds whole tokens, and goes on.
    assert cache[0].size() <= 32
    mlx_h2o.generate(model, tokenizer, " and", max_tokens=2, prompt_cache=cache)
    assert mlx_h2o.generate(model, tokenizer, TEXT, max_tokens=12, **SETTINGS) == expected


def test_caches_that_a_step_left_at_different_tokens_are_refused(demo, monkeypatch):
    model, tokenizer = demo
    caches = mlx_h2o.make_prompt_cache(model, layers="equal", **SETTINGS)
    update = mlx_h2o.H2OKVCache.update_and_fetch
    mlx_h2o.generate(model, tokenizer, [1, 2], max_tokens=2, prompt_cache=caches)

    def struck(cache: mlx_h2o.H2OKVCache, *given: mx.array) -> object:
        if cache.name.endswith("layer 3"):
            signal.raise_signal(signal.SIGINT)
        return update(cache, *given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(mlx_h2o.H2OKVCache, "update_and_fetch", struck)
        mlx_h2o.generate(model, tokenizer, [3], prompt_cache=caches)
    said = "after 4 and after 5 tokens, expected as many in all: a step was interrupted"
    with pytest.raises(ValueError, match=said):
        mlx_h2o.generate(model, tokenizer, [3], prompt_cache=caches)


@pytest.mark.parametrize("program", ["demo", "hardware"])
def test_other_programs_end_in_one_line_too(program, monkeypatch, capsys):
    errors = {130: KeyboardInterrupt(), 2: OSError(28, "No space left on device", "figures.json")}
    monkeypatch.setattr(sys, "argv", ["", "--model", "demo"])
    monkeypatch.delitem(sys.modules, f"mlx_h2o.{program}.__main__", raising=False)
    for status, error in errors.items():
        monkeypatch.setattr(mlx_h2o, "load", Mock(side_effect=error))
        with pytest.raises(SystemExit, match=str(status)):
            runpy.run_module(f"mlx_h2o.{program}", run_name="__main__")
        said = capsys.readouterr().err.split(f"python -m mlx_h2o.{program}: ")[1]
        assert "interrupted" in said or "No space left on device: 'figures.json'" in said
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match=r"lm_eval.*, expected pip install 'mlx-h2o\[eval\]'"):
        runpy.run_module("mlx_h2o.evaluation.harness", run_name="__main__")


def generating(*arguments: str, **pipes: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "mlx_h2o", "generate", "--model", "demo", "-p", TEXT]
    flags = ["--max-kv-size", "32", "-m", "100000", *arguments]
    return subprocess.Popen([*command, *flags], text=True, stderr=subprocess.PIPE, **pipes)


@pytest.mark.slow
def test_ctrl_c_ends_a_command_in_one_line():
    with generating(stdout=subprocess.PIPE) as running:
        # It writes. Before its first token MLX asks for a compiler by system(3), which ignores
        # Ctrl-C for as long.
        assert len(running.stdout.read(200)) == 200
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "mlx_h2o generate: interrupted" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_the_chat_goes_on(folder):
    """It continues as after a text that ends where the answer ended."""
    command = [sys.executable, "-u", "-m", "mlx_h2o", "chat", "--model", str(chat_model(folder))]
    flags = ["--max-kv-size", "64", "--layers", "equal", "-m", "100000"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, *flags], text=True, **pipes) as running:

        def answer(question: str) -> str:
            running.stdin.write(f"{question}\n")
            running.stdin.flush()
            said = running.stdout.read(300)
            running.send_signal(signal.SIGINT)
            while not said.endswith(" GB\n"):
                part = running.stdout.read(1)
                assert part, running.stderr.read()
                said += part
            return said

        first, second = answer("The ship"), answer("The sea")
        rest, said = running.communicate("q\n", timeout=60)
    assert running.returncode == 0 and not said
    assert rest.splitlines()[-1].startswith("KV cache: keydiff, 6 of 6 layers evict")
    head, _, first = first.partition(f"{chat.HELP}\n")
    assert "KV cache: 64 rows a head by keydiff" in head
    texts = [part.partition(" ...\n")[0] for part in (first, second)]
    assert all(texts)
    model, tokenizer = mlx_h2o.load(str(folder))
    caches = mlx_h2o.make_prompt_cache(model, 64, layers="equal")
    for question, text in zip(("The ship", "The sea"), texts, strict=True):
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        given = {"max_tokens": 100_000, "prompt_cache": caches}
        found = ""
        for part in mlx_h2o.stream_generate(model, tokenizer, prompt, **given):
            found += part.text
            if len(found) >= len(text):
                break
        assert found == text


def test_ctrl_c_while_a_question_is_read_takes_it_back(demo):
    """A long one, which is read in steps; the first step is read to its end."""
    model, tokenizer = demo
    caches = mlx_h2o.make_prompt_cache(model, **SETTINGS)
    mlx_h2o.generate(model, tokenizer, "The ship", max_tokens=4, prompt_cache=caches)
    before = [(one.offset, one.size()) for one in caches]
    pressed = []

    def press(logits: mx.array) -> mx.array:
        pytest.fail("it answers")

    def once(self: object, said: str, done: int, total: int) -> None:
        if done and not pressed:
            pressed.append(done)
            signal.raise_signal(signal.SIGINT)

    tokens = tokenizer.encode(TEXT)
    given = {"max_tokens": 3, "prefill_step_size": 4, "sampler": press}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat.Watch, "__call__", once)
        found = chat._answered(model, tokenizer, tokens, caches, **given)
    assert pressed == [4] and len(tokens) > 8
    assert [(one.offset, one.size()) for one in found] == before
    given["sampler"] = None
    assert chat._answered(model, tokenizer, tokens, found, **given) is found
    assert found[0].offset > before[0][0] + len(tokens)


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_a_command_quietly():
    reads, writes = os.pipe()
    with generating(stdout=writes) as running:
        os.close(writes)
        with open(reads) as output:
            output.readline()
        said = running.stderr.read()
        running.wait(60)
    assert running.returncode == 1, said
    assert "Broken" not in said and "Traceback" not in said


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_and_ends_the_server():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "mlx_h2o", "server", "--model", "demo", "--port", port]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert "mlx_h2o server: " in run.stderr and "in use" in run.stderr
    assert "Traceback" not in run.stderr
