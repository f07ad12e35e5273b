"""The command `server`, tested over HTTP."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tuner.utils import linear_to_lora_layers

import plain_http as httpx
from mlx_h2o import load, make_prompt_cache
from mlx_h2o.commands.options import CacheSettings
from mlx_h2o.commands.server import _name
from mlx_h2o.lm.outline import Outline, total_bytes
from mlx_h2o.lm.routing import bounds
from mlx_h2o.serving.memory import Memory
from tiny_models import tiny_qwen3

pytestmark = pytest.mark.downstream

FLAGS = "--max-kv-size 24 --sink-size 2 --policy keydiff"
TEXT = "It was a dark night, and the wind was in the trees. The captain looked at the sea and"


class Server:
    """One that answers."""

    process: subprocess.Popen[bytes]

    def __init__(self, log: Path) -> None:
        self.log, self.port = log, 0

    def ask(self, prompt: str, **settings: Any) -> dict[str, Any]:
        """The answer to a completion, or what the server says is wrong."""
        with self.open(prompt, **settings) as answer:
            return json.loads(answer.read())

    def open(self, prompt: str, **settings: Any) -> Any:
        """The answer to a completion, to read as it comes."""
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0} | settings
        place = f"http://127.0.0.1:{self.port}/v1/completions"
        return httpx.stream("POST", place, json=body, timeout=60)

    def wait(self, said: str = "startup complete") -> None:
        """Until its log says this."""
        while said not in (log := self.log.read_text()):
            assert self.process.poll() is None, log
            time.sleep(0.01)
        self.port = int(re.findall(r"on http://\S+:(\d+)", log)[0])


@contextmanager
def serving(folder: Path, flags: str, given: str = FLAGS, **until: str) -> Iterator[Server]:
    server, arguments = Server(folder / "log"), f"--model demo --port 0 {given} {flags}".split()
    with server.log.open("w") as file:
        server.process = subprocess.Popen(
            [sys.executable, "-m", "mlx_h2o", "server", *arguments], stdout=file, stderr=file,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    try:
        server.wait(**until)
        yield server
    finally:
        server.process.terminate()
        server.process.wait(60)
    assert "Traceback" not in server.log.read_text()


LONG = " ".join([TEXT] * 14)


@pytest.mark.slow
@pytest.mark.matrix(3)
@pytest.mark.parametrize("flags", [
    "--kv-bits 8 --light-bits 4 --dense-size 4 --sparse-v 1e-6",
    "--kv-bits 8 --light-bits 4 --dense-size 0", "--budgets {folder}/budgets.json",
    "--draft-model demo --num-draft-tokens 2", "--max-kv-bytes 3MB",
])  # fmt: skip
def test_it_answers_with_every_kind_of_cache(flags, tmp_path):
    (tmp_path / "budgets.json").write_text(json.dumps({"budgets": [30, 24, 24, 24, 24, 18]}))
    given = FLAGS if "bytes" not in flags else ""
    with serving(tmp_path, flags.format(folder=tmp_path), given) as server:
        first = server.ask(TEXT)
        assert first["usage"]["completion_tokens"] == 12
        longer = server.ask(TEXT + first["choices"][0]["text"] + " and then the old man said")
        assert longer["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
        assert len(longer["choices"][0]["text"]) > 12


@pytest.mark.slow
def test_a_restarted_server_goes_on_with_what_it_has_read(tmp_path):
    flags = f"--cache-dir {tmp_path / 'kept'} --cache-size 50MB"
    with serving(tmp_path, flags) as server:
        first = server.ask(LONG)["choices"][0]["text"]
        server.ask(TEXT)  # which is short, and not worth a file
    assert len(list((tmp_path / "kept").iterdir())) == 2  # the prompt, and the answer too
    turn = LONG + first + " and then"
    with serving(tmp_path, flags) as server:
        found = server.ask(turn)
    with serving(tmp_path, "") as server:
        assert server.ask(LONG)["choices"][0]["text"] == first
        expected = server.ask(turn)
    assert found["choices"][0]["text"] == expected["choices"][0]["text"]
    assert found["usage"] == expected["usage"]
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 280


LOST = "the server has ended before the answer did"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "tokens", "told", "seconds", "ended"),
    [
        ("", 150, '"finish_reason": "length"', 30, "every answer was finished"),
        ("--grace 1", 100_000, LOST, 1, "answers were lost"),
    ],
)
def test_running_answers_are_finished_when_it_ends(flags, tokens, told, seconds, ended, tmp_path):
    """Or lost where they take longer, which is said."""
    with serving(tmp_path, flags) as server:
        with server.open(TEXT, max_tokens=tokens, stream=True) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            server.process.send_signal(signal.SIGINT if flags else signal.SIGTERM)
            text = "\n".join(lines)
            assert server.process.wait(30) == 0
        assert told in text and text.rstrip().endswith("data: [DONE]")
        log = server.log.read_text()
    assert f"ending: 1 answers have {seconds} seconds" in log
    assert f"ended: {ended}" in log


@pytest.mark.slow
def test_asked_twice_it_waits_for_nothing(tmp_path):
    with (
        serving(tmp_path, "--grace 600") as server,
        server.open(TEXT, max_tokens=100_000, stream=True) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines)
        server.process.send_signal(signal.SIGINT)
        server.wait("ending: 1 answers have 600 seconds")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(5) == 130


@pytest.mark.slow
def test_it_ends_when_it_is_told_so_before_it_is_up(tmp_path):
    six = any("lo" in file.read_text() for file in Path("/proc/net").glob("if_inet6"))
    host, said = ("::1", r"\[::1\]") if six else ("127.0.0.1", "127.0.0.1")
    with serving(tmp_path, f"--host {host}", said="on http://") as server:
        assert re.search(rf"on http://{said}:\d+, KV cache: 24 rows", server.log.read_text())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) in (0, -signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="Linux limits other processes")
def test_clients_beyond_all_files_are_told_of_now_and_then(tmp_path):
    with serving(tmp_path, "") as server:
        most = len(os.listdir(f"/proc/{server.process.pid}/fd")) + 8
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (most, most))
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(64)]
        time.sleep(2)
        for one in clients:
            one.close()
        assert server.ask(TEXT)["usage"]["completion_tokens"] == 12
        assert 0 < server.log.read_text().count("out of system resource") < 9
        server.log.write_text("")  # of its tracebacks, which are asyncio's


@pytest.mark.slow
def test_a_long_step_keeps_nobody_waiting_when_it_ends(tmp_path):
    """Clients are told, and the process ends, though the model is still computing."""
    flags = "--max-kv-size none --prefill-step-size 8192 --grace 0"
    with serving(tmp_path, flags, "") as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.ask, LONG * 28)
        metrics = f"http://127.0.0.1:{server.port}/metrics"
        while "mlx_h2o_running 1.0" not in httpx.get(metrics).text:
            assert not asked.done()
        half = socket.create_connection(("127.0.0.1", server.port))  # of a request
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 9\r\n\r\n")
        server.process.send_signal(signal.SIGTERM)
        assert LOST in asked.result()["error"]["message"]
        assert server.process.wait(20) == 0
        half.close()
    assert "ended: answers were lost" in server.log.read_text()


@pytest.mark.slow
def test_a_template_that_refuses_a_single_message(tmp_path):
    with serving(tmp_path, "--chat-template {{raise_exception('alone')}}") as server:
        assert "the chat template refuses a single message: alone" in server.log.read_text()
        assert server.ask(TEXT)["usage"]["completion_tokens"] == 12
        place, chat = f"http://127.0.0.1:{server.port}/v1/chat/completions", [{"role": "user"}]
        refused = httpx.post(place, json={"messages": chat}).json()["error"]["message"]
        assert refused == "messages do not suit the model's chat template: alone."


def test_caches_on_disk_are_of_a_model_settings_and_a_format(monkeypatch):
    found = set()
    for layers in (1, 2):
        models = [tiny_qwen3(layers=layers)]
        for settings in ({}, {"max_kv_size": 20}, {"kv_bits": 8, "kv_group_size": 32}):
            make = partial(CacheSettings({"layers": "equal"} | settings).caches, *models)
            found |= {_name(models, make), _name(models, make)}
    models[0].args.rope_theta += 1  # with the same weights
    found.add(_name(models, make))
    linear_to_lora_layers(models[0], 1, {"rank": 2, "dropout": 0.0, "scale": 1.0})
    for scale in (1.0, 2.0):
        models[0].layers[-1].self_attn.q_proj.scale = scale
        found.add(_name(models, make))
    for kind in (mx.float16, mx.float32):  # the same numbers, and rows of another kind
        models[0].set_dtype(kind)
        found.add(_name(models, make))
    monkeypatch.setattr("mlx_h2o.commands.server.FORMAT", 99)
    assert len(found | {_name(models, make)}) == 12


def test_as_many_prompts_and_answers_at_a_time_as_fit(tmp_path, refused):
    """In 600 MB there are fewer than usual, which is said; one asked for is kept or refused."""
    with serving(tmp_path, "--memory 600MB") as server:
        assert server.ask(TEXT)["usage"]["completion_tokens"] == 12
        said = server.log.read_text()
        assert "memory of 600,000,000 bytes: 1 prompts are read" in said
        assert "demo has no chat template: chats become lines like user: hello" in said
    given = ["--model", "demo", "--port", "0", "--memory", "600MB", "--prompt-concurrency", "8"]
    assert "reading prompts, 8 at a time, takes" in refused("server", *given)


def test_prompts_that_are_read_take_half_of_what_the_weights_leave():
    model = load("demo")[0]

    def fits(limit: int, **given: int) -> Memory:
        return Memory([model], lambda: make_prompt_cache(model), limit * 10**6, **given)

    with pytest.raises(ValueError, match="expected more than") as error:
        fits(100)
    assert fits(int(re.findall(r"more than (\d+),", str(error.value))[0]) + 1).free > 0
    for limit, prompts in ((400, 1), (1000, 2), (8000, 8)):
        found = fits(limit)
        assert (found.prompts, found.lowered) == (prompts, prompts < 8)
        assert found.free > found.of_request(2048)
    asked = fits(900, decode=7, prompts=1)
    assert (asked.prompts, asked.decode, asked.lowered) == (1, 7, False)


@pytest.mark.parametrize("tokens", [200, 256, 300, 1200])
def test_a_request_takes_what_its_rows_take_where_some_heads_keep_more(tokens):
    """Up to 256 tokens every head keeps all; later one layer gets rows of the others."""
    model = load("demo")[0]
    make = partial(make_prompt_cache, model, 256)
    assert bounds(make()) == [(256, rows) for rows in (117, 117, 117, 117, 949, 117)]
    filled = [*Outline(model).fed(make(), tokens, 1)][-1]
    assert Memory([model], make, 1 << 33).of_request(tokens) >= total_bytes(filled)
