"""A server of several processes answers like one of a single process, and all end together."""

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rank_processes import LONGEST, ended, pausing, saved, started
from tiny_models import random_prompt

__all__ = ["pausing", "saved"]
pytestmark = [pytest.mark.downstream, pytest.mark.slow]

PREFIX = random_prompt(150, seed=1)
ASKED: list[dict[str, Any]] = [
    {"prompt": random_prompt(20, seed=2)},
    {"prompt": PREFIX + random_prompt(30, seed=3)},
    {"prompt": random_prompt(90, seed=4), "temperature": 1, "seed": 5, "n": 2},
    {"prompt": random_prompt(9, seed=6), "temperature": 0.7, "top_k": 20, "seed": 7, "logprobs": 2},
    {"prompt": random_prompt(50, seed=8), "repetition_penalty": 1.3, "logit_bias": {"3": 2}},
    {"prompt": random_prompt(60, seed=9), "stop": ["t7 t"], "max_tokens": 40},
]
AGAIN: list[dict[str, Any]] = [
    {"prompt": PREFIX + random_prompt(30, seed=3) + random_prompt(12, seed=10)},
    {"prompt": random_prompt(90, seed=4) + random_prompt(5, seed=11), "temperature": 1, "seed": 1},
]


class Group:
    """A server of some processes."""

    def __init__(self, port: int, processes: list[subprocess.Popen[str]]) -> None:
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONGEST)
        self.processes, self.said = processes, list[tuple[str, str]]()

    def ask(self, asked: dict[str, Any]) -> tuple[list[str], int]:
        """Texts, and how many tokens were not read again."""
        body = {"max_tokens": 16, "temperature": 0} | asked
        found = self.client.post("v1/completions", json=body).raise_for_status().json()
        texts = [one["text"] for one in found["choices"]]
        return texts, found["usage"]["prompt_tokens_details"]["cached_tokens"]

    def all(self) -> list[Any]:
        """Answers to all at once, the same with what was read before, and behind one who left."""
        with ThreadPoolExecutor(len(ASKED)) as pool:
            texts = [texts for texts, _ in pool.map(self.ask, ASKED)]
        again = [self.ask(one) for one in AGAIN]
        body = ASKED[0] | {"max_tokens": 4000, "stream": True}
        with self.client.stream("POST", "v1/completions", json=body) as answer:
            assert next(answer.iter_lines())
        while "mlx_h2o_running 0" not in self.client.get("metrics").text:
            time.sleep(0.1)
        return [texts, again, [self.ask(one)[0] for one in ASKED[:3]]]


@contextmanager
def serving(
    count: int, model: str, folder: Path, environment: dict[str, str], *flags: str,
    dies: bool = False,
) -> Iterator[Group]:  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    command = ["-m", "mlx_h2o", "server", "--model", model, "--port", str(port), *flags]
    command += ["--memory", "4GB", "--grace", "2"]
    group = Group(port, processes := started(count, folder, environment, *command))
    try:
        until = time.monotonic() + LONGEST
        while True:
            try:
                group.client.get("health").raise_for_status()
                break
            except httpx.HTTPError:
                assert all(one.poll() is None for one in processes) and time.monotonic() < until
                time.sleep(0.1)
        yield group
    finally:
        for one in processes:  # as a terminal does with Ctrl-C
            one.send_signal(signal.SIGINT)
        group.client.close()
        group.said = said = ended(processes)
    if not dies:
        assert "Traceback" not in said[0][1], said
        assert all(one == ("", "") for one in said[1:]), said


KINDS = {
    "layers": ["--pipeline", "--max-kv-size", "40", "--policy", "h2o"],
    "unbounded": ["--max-kv-size", "none"],
    "keydiff": ["--max-kv-size", "40", "--policy", "keydiff"],
    "packed": ["--max-kv-size", "40", "--policy", "h2o", "--kv-bits", "8", "--kv-group-size", "32"],
}
GONE = {"layers": 1, "keydiff": 0, "packed": 1}
"""The process that is killed in the end, of a server that does not end in order."""


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", KINDS)
def test_several_processes_say_what_one_says_and_end_together(
    kind: str, saved: str, tmp_path: Path, pausing: dict[str, str]
) -> None:
    with serving(1, saved, tmp_path, {}, *KINDS[kind]) as one:
        expected = one.all()
    assert min(cached for _, cached in expected[1]) >= 80
    gone = GONE.get(kind)
    with serving(2, saved, tmp_path, pausing, *KINDS[kind], dies=gone is not None) as group:
        assert group.all() == expected
        check_that_what_fails_in_one_process_fails_alone(group)
        if gone is not None:
            group.processes[gone].kill()
            group.processes[1 - gone].wait(60)
    if gone is None:
        assert [one.returncode for one in group.processes] == [0, 0]
    else:
        assert group.processes[1 - gone].returncode not in (0, None)
        assert "mlx_h2o server: " in group.said[1 - gone][1]


def check_that_what_fails_in_one_process_fails_alone(group: Group) -> None:
    """A schema is kept to by the first process alone."""
    chat = {"messages": [{"role": "user", "content": "t1 t2"}], "max_tokens": 5}
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    before = group.ask(ASKED[0])
    answer = group.client.post("v1/chat/completions", json=chat | {"response_format": schema})
    assert answer.status_code in (400, 500)
    assert group.ask(ASKED[0])[0] == before[0]
