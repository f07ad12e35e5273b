"""What is interrupted leaves nothing behind: Ctrl-C, a reader or a client that goes away."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_h2o
from mlx_h2o.lm import upstream
from mlx_h2o.lm.hosting import hosting
from mlx_h2o.lm.replacements import PATCHES
from test_server import TEXT, serving

pytestmark = pytest.mark.downstream

SETTINGS = {"max_kv_size": 32, "policy": "h2o-ema"}


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell's background jobs ignore Ctrl-C, and so would pytest there, and what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def names() -> dict[str, object]:
    """What mlx_lm's names stand for."""
    found = {}
    for module, table in upstream.NAMES.items():
        namespace = vars(importlib.import_module(f"mlx_lm.{module}"))
        found |= {f"{module}.{name}": namespace[name] for name in table}
    model = vars(importlib.import_module("mlx_lm.models.qwen3"))
    return found | {"qwen3": model[upstream.ATTENTION]}


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
@pytest.mark.parametrize("hosted", [False, True])
def test_ctrl_c_in_generate_leaves_mlx_lm_as_it_was(after, hosted):
    model, tokenizer = mlx_h2o.load("demo")
    before = names()
    expected = mlx_h2o.generate(model, tokenizer, TEXT, max_tokens=12, **SETTINGS)
    cache = mlx_h2o.make_prompt_cache(model, **SETTINGS)
    given = {"max_tokens": 12, "prompt_cache": cache, "sampler": interrupting(after)}
    with pytest.raises(KeyboardInterrupt):
        if hosted:
            with hosting(mlx_h2o.H2OConfig(**SETTINGS)):
                mlx_h2o.generate(model, tokenizer, TEXT, **given)
        else:
            mlx_h2o.generate(model, tokenizer, TEXT, **given)
    assert names() == before
    assert not PATCHES._replaced
    # The cache holds whole tokens, and goes on.
    assert cache[0].size() <= 32
    mlx_h2o.generate(model, tokenizer, " and", max_tokens=2, prompt_cache=cache)
    assert mlx_h2o.generate(model, tokenizer, TEXT, max_tokens=12, **SETTINGS) == expected


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


def busy(process: int) -> float:
    """Seconds of a processor that it has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_client_that_goes_away_is_not_written_for(tmp_path):
    with serving(tmp_path, "--grace 1") as server:
        with server.open(TEXT, max_tokens=100000, stream=True) as response:
            for _ in range(3):
                assert response.readline()
        process = server.process.pid
        for _ in range(60):
            before = busy(process)
            time.sleep(1)
            if busy(process) - before < 0.5:
                break
        else:
            pytest.fail("it goes on writing")
        assert "a client went away" in server.log.read_text()
        assert server.ask("The ship", max_tokens=3)["usage"]["completion_tokens"] == 3
        # Ctrl-C in the middle of a request.
        with server.open(TEXT, max_tokens=100000, stream=True) as response:
            response.readline()
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(60) in (0, 130)


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
