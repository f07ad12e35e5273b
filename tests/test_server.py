"""mlx_lm's server with caches that evict, asked over HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_h2o import H2OConfig
from mlx_h2o.lm.hosting import hosting
from routing_checks import mlx_lm_stays_as_it_is

__all__ = ["mlx_lm_stays_as_it_is"]  # a fixture around every test

pytestmark = pytest.mark.downstream

FLAGS = "--max-kv-size 24 --sink-size 2 --policy keydiff"
TEXT = "It was a dark night, and the wind was in the trees. The captain looked at the sea and"


class Server:
    """One that answers."""

    process: subprocess.Popen[bytes]

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self.log = log

    def ask(self, prompt: str, **settings: Any) -> dict[str, Any]:
        """The answer to a completion, or what the server says is wrong."""
        try:
            with self.open(prompt, **settings) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def open(self, prompt: str, **settings: Any) -> Any:
        """The answer to a completion, to read as it comes."""
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0} | settings
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=60)

    def wait(self) -> None:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None, self.log.read_text()
                time.sleep(0.1)


@contextmanager
def serving(folder: Path, flags: str) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = Server(port, folder / "log")
    given = f"--model demo --port {port} {FLAGS} {flags}".split()
    with server.log.open("w") as file:
        server.process = subprocess.Popen(
            [sys.executable, "-m", "mlx_h2o", "server", *given],
            stdout=file,
            stderr=file,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    try:
        server.wait()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(30)
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "flags",
    [
        "--kv-bits 8 --light-bits 4 --dense-size 4 --sparse-v 1e-6",
        "--kv-bits 8 --light-bits 4 --dense-size 0",
    ],
)
def test_it_answers_with_packed_rows(flags, tmp_path):
    with serving(tmp_path, flags) as server:
        check_answers(server)


def check_answers(server: Server) -> None:
    first = server.ask(TEXT)
    longer = server.ask(TEXT + first["choices"][0]["text"] + " and then the old man said")
    assert first["usage"]["completion_tokens"] == 12
    assert longer["choices"][0]["text"]


@pytest.mark.slow
def test_it_answers_with_a_budget_for_each_layer(tmp_path):
    file = tmp_path / "budgets.json"
    file.write_text(json.dumps({"budgets": [30, 24, 24, 24, 24, 18]}))
    with serving(tmp_path, f"--budgets {file}") as server:
        assert server.ask(TEXT + TEXT)["usage"]["completion_tokens"] == 12


@pytest.mark.exhaustive
def test_more_draft_tokens_than_the_flag_are_as_many_as_the_flag(tmp_path):
    """On a cache that has evicted, and on one that goes on from there."""
    with serving(tmp_path, "--draft-model demo --num-draft-tokens 2") as server:
        check_answers(server)
        expected = server.ask(TEXT, num_draft_tokens=2)["choices"][0]["text"]
        following = server.ask(TEXT + expected + " and", num_draft_tokens=2)["choices"][0]["text"]
    with serving(tmp_path, "--draft-model demo --num-draft-tokens 2") as server:
        found = server.ask(TEXT, num_draft_tokens=9)["choices"][0]["text"]
        assert found == expected
        found = server.ask(TEXT + expected + " and", num_draft_tokens=1000)["choices"][0]["text"]
        assert found == following


@pytest.mark.slow
def test_it_answers_and_refuses_a_draft_model_that_only_the_request_names(tmp_path):
    with serving(tmp_path, "") as server:
        check_answers(server)
        refused = server.ask(TEXT, draft_model="demo")
        assert refused == {
            "error": "[server] the request names a draft model, whose rejected tokens the caches "
            "of this server cannot take back: expected --draft-model when it was started."
        }
        assert server.ask(TEXT)["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (3, 3), (4, 3), (100, 3)])
def test_what_mlx_lm_is_asked_to_draft(monkeypatch, asked, given):
    import mlx_lm.server

    seen = []
    monkeypatch.setattr(mlx_lm.server, "stream_generate", lambda **kwargs: seen.append(kwargs))
    with hosting(H2OConfig(speculative=3)):
        mlx_lm.server.stream_generate(draft_model=object(), num_draft_tokens=asked)
        mlx_lm.server.stream_generate(draft_model=None, num_draft_tokens=asked)
    assert [kwargs["num_draft_tokens"] for kwargs in seen] == [given, asked]
