"""The server under a mixed load: does memory grow, is every answer right, does it end cleanly?

    nox -s soak -- 10000 --json benchmarks/results/soak.json

Sixteen clients, threads with the ``openai`` package, send this many requests, or for --seconds at
most, to one server with a bounded cache: completions and chats, streamed or not, prompts many times
as long as the budget and longer than the model's context, prompts that begin with one of three
texts, streams that are abandoned halfway, requests with a seed, and invalid requests. Each greedy
request has been answered before by the idle server. At the end the server gets SIGTERM while each
client reads a stream. The result counts answers that are missing or differ from the idle server's,
and has the server's resident memory and the time to the first token.

Once rows have been evicted, an answer depends on how many tokens came from a kept prompt. It is
compared with the idle server's for as many ``cached_tokens``, or counted apart if there is none.
"""

from __future__ import annotations

import collections
import json
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai

import mlx_h2o
from lib import common, servers

FLAGS = (
    "--model demo --max-kv-size 168 --layers equal --prefill-step-size 256 "
    "--decode-concurrency 12 --prompt-concurrency 4 --prompt-cache-size 128 --cache-size 40MB"
)
SHORT = 24
"""How many of the first :func:`requests` are asked most often."""
BUDGET = 168
"""Up to this many tokens all rows stay, so that answers do not depend on the cached tokens."""
BLOCK = 300.0
"""Seconds of samples averaged into one, since samples that lie closer depend on each other."""


class Request:
    """A request, and the idle server's answers to it: texts by the number of cached tokens."""

    def __init__(self, name: str, **body: Any) -> None:
        self.name, self.body = name, {"model": "default_model", "temperature": 0} | body
        self.alone: dict[int, str] = {}
        self.total = 0

    def expected(self, cached: int) -> str | None:
        whole = self.total <= BUDGET
        return next(iter(self.alone.values())) if whole else self.alone.get(cached)


class Answer:
    """The answer to a request: its text, cached tokens and all tokens, seconds to the first piece,
    and whether it is complete."""

    def __init__(self) -> None:
        self.text, self.cached, self.total, self.first = "", 0, 0, None
        self.whole = False

    def take(self, answer: Any) -> None:
        for choice in answer.choices:
            part = getattr(choice, "message", None) or getattr(choice, "delta", None)
            self.text += (part.content if part is not None else choice.text) or ""
            self.whole |= choice.finish_reason is not None
        if answer.usage:
            self.total = answer.usage.total_tokens
            self.cached = answer.usage.prompt_tokens_details.cached_tokens


def send(
    client: openai.OpenAI,
    request: Request,
    *,
    stream: bool = False,
    leave: int | None = None,
    found: Answer | None = None,
) -> Answer:
    """The answer; for a stream that is abandoned after ``leave`` pieces, their text."""
    api = client.chat.completions if "messages" in request.body else client.completions
    found, begun = found or Answer(), time.perf_counter()
    if not stream:
        found.take(api.create(**request.body))
        return found
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with api.create(**request.body, **options) as pieces:
        for count, piece in enumerate(pieces, 1):
            found.take(piece)
            if found.text and found.first is None:
                found.first = time.perf_counter() - begun
            if count == leave:
                break
    return found


def requests() -> tuple[list[Request], list[tuple[Request, Request]]]:
    """Completions, and chats of two turns; the second needs the answer to the first."""
    _, tokenizer = mlx_h2o.load("demo")
    tokens = tokenizer.encode(mlx_h2o.demo.text())

    def part(start: int, count: int) -> str:
        return tokenizer.decode([tokens[(start + i) % len(tokens)] for i in range(count)])

    texts = []
    for i in range(SHORT):
        shared = part(900, 50) if i % 2 else ""
        prompt = f"{shared}{i} {part(37 * i, 8 + 37 * i % 170)}"
        texts.append(Request(f"text {i}", prompt=prompt, max_tokens=4 + i % 12))
    for i in range(3):
        prompt = f"long {i} {part(211 * i, 400 + 300 * i)}"
        texts.append(Request(f"long {i}", prompt=prompt, max_tokens=12))
    texts.append(Request("at the end", prompt=part(300, 40), max_tokens=100))
    texts.append(Request("beyond the context", prompt=part(5, 2200), max_tokens=8))
    for i in range(2):
        prompt = f"seed {i} {part(91 * i, 60)}"
        texts.append(Request(f"seed {i}", prompt=prompt, max_tokens=16, seed=i))
    chats = []
    for i in range(8):
        system = {"role": "system", "content": part(400 + 400 * (i % 2), 60 + 60 * (i % 2))}
        user = {"role": "user", "content": f"{i} {part(53 * i, 10 + 5 * i)}"}
        first = Request(f"chat {i}", messages=[system, user], max_tokens=10 + i)
        more = {"role": "user", "content": part(71 * i, 12)}
        second = Request(f"chat {i}, second turn", messages=[system, user, more], max_tokens=12)
        chats.append((first, second))
    return texts, chats


def answer_alone(client: openai.OpenAI, texts: list[Request], chats: list[Any]) -> None:
    """Ask for each answer while the server is idle; chats both from the start and continued."""

    def ask(request: Request) -> str:
        found = send(client, request)
        request.total = found.total
        before = request.alone.setdefault(found.cached, found.text)
        if before != found.text:
            raise SystemExit(f"{request.name}: {before!r}, and now {found.text!r}")
        return found.text

    for first, second in chats:
        said = {"role": "assistant", "content": ask(first)}
        second.body["messages"].insert(2, said)
    for request in texts + texts:  # these drive the first turns out of memory
        ask(request)
    for first, second in chats:
        ask(second)
        ask(first)
        ask(second)


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[tuple[openai.OpenAI, subprocess.Popen[bytes]]]:
    """A client of a new server, and the server's process, which must end with status 0."""
    given = (*FLAGS.split(), "--cache-dir", str(folder / "prompts"), *flags)
    with servers.server(*given, log=folder / "log") as (port, process):
        root = f"http://127.0.0.1:{port}/v1"
        yield openai.OpenAI(base_url=root, api_key="none", max_retries=0, timeout=900), process
    if process.returncode != 0:
        raise SystemExit(f"the server ended with status {process.returncode}")


class Load:
    """Clients that ask until ``most`` requests were answered, and the results."""

    def __init__(
        self, client: openai.OpenAI, texts: list[Request], chats: list[Any], most: int
    ) -> None:
        self.client, self.texts, self.chats, self.most = client, texts, chats, most
        # Clients append to these at the same time.
        self.asked: list[str] = []
        self.counted: list[str] = []
        self.first: list[float] = []
        self.other: list[dict[str, Any]] = []
        self.lost: list[str] = []
        self.ended = threading.Event()

    def ask_on(self, number: int) -> None:
        rng = random.Random(number)
        while not self.ended.is_set():
            kind = rng.choices(["text", "chat", "left", "sampled", "wrong"], [50, 20, 15, 10, 5])[0]
            try:
                getattr(self, kind)(rng)
                self.counted.append(kind)
            except openai.OpenAIError as error:
                self.lost.append(f"{kind}: {error!r}")

    def send(self, request: Request, **given: Any) -> Answer:
        self.asked.append(request.name)
        if len(self.asked) >= self.most:
            self.ended.set()
        found = send(self.client, request, **given)
        if found.first is not None:
            self.first.append(found.first)
        return found

    def text(self, rng: random.Random) -> None:
        self.compare(self.any_text(rng), rng)

    def any_text(self, rng: random.Random) -> Request:
        """A text, usually a short one."""
        return rng.choice(self.texts[:SHORT] if rng.random() < 0.98 else self.texts)

    def chat(self, rng: random.Random) -> None:
        for turn in rng.choice(self.chats):
            self.compare(turn, rng)

    def left(self, rng: random.Random) -> None:
        request = rng.choice([self.any_text(rng), *rng.choice(self.chats)])
        self.compare(request, rng, leave=rng.randint(1, 6))

    def sampled(self, rng: random.Random) -> None:
        one = self.any_text(rng)
        warm = Request(one.name, **{**one.body, "temperature": 0.8, "top_p": 0.9})
        self.send(warm, stream=True)

    def wrong(self, rng: random.Random) -> None:
        body = rng.choice([{"prompt": ""}, {"prompt": "a", "stop": [1]}, {"messages": []}])
        try:
            self.send(Request("wrong", **body))
        except openai.BadRequestError:
            return
        self.differs(Request("wrong", **body), "an answer", "status 400")

    def compare(self, request: Request, rng: random.Random, leave: int | None = None) -> None:
        streamed = leave is not None or rng.random() < 0.6
        found = self.send(request, stream=streamed, leave=leave)
        expected = request.expected(found.cached)
        if leave is not None and not found.whole:
            texts = request.alone.values()  # the usage, which tells them apart, comes last
            if not any(text.startswith(found.text) for text in texts):
                self.differs(request, found.text, str(expected))
        elif not found.whole or expected not in (None, found.text):
            self.differs(request, found.text, str(expected), found.cached)
        self.counted.append("from elsewhere" if expected is None else "compared")
        if found.cached:
            self.counted.append("found rows")

    def differs(self, request: Request, found: str, expected: str, cached: int = 0) -> None:
        said = {"request": request.name, "found": found, "expected": expected}
        self.other.append(said | {"cached_tokens": cached})


def watch(process: int, ended: threading.Event, found: list[tuple[float, float, int]]) -> None:
    """Note four times a second: the time, megabytes resident, open files."""
    begun, over = time.monotonic(), False
    while not over:
        files = len(list(Path(f"/proc/{process}/fd").iterdir()))
        size = common.memory("VmRSS", f"{process}/status") / 1e6
        found.append((time.monotonic() - begun, size, files))
        over = ended.wait(0.25)


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Least squares: the slope, and its 95 % interval by Student's distribution."""
    (found, _), covariance = np.polyfit(times, values, 1, cov=True)
    z, free = 1.959964, len(times) - 2
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    off = t * float(np.sqrt(covariance[0, 0]))
    return found, found - off, found + off


def growth(samples: Sequence[tuple[float, float, int]], block: float) -> dict[str, float]:
    """Megabytes per hour, from means of blocks of samples; empty for fewer than four blocks."""
    blocks: dict[int, list[float]] = collections.defaultdict(list)
    for when, size, _ in samples:
        blocks[int(when / block)].append(size)
    full = sorted(blocks)[:-1]  # the last block is incomplete
    if len(full) < 4:
        return {}
    found = slope([block / 3600 * one for one in full], [np.mean(blocks[one]) for one in full])
    return dict(zip(("slope", "low", "high"), (round(one, 3) for one in found), strict=True))


def end(client: openai.OpenAI, process: Any, request: Request, clients: int) -> dict[str, Any]:
    """Send SIGTERM while half of the clients read a stream and the others begin; what they get."""
    found = [Answer() for _ in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        for one in found:
            pool.submit(send, client, request, stream=True, found=one)
        while sum(bool(one.text) for one in found) < clients / 2:
            time.sleep(0.01)
        running = sum(not one.whole for one in found)
        begun = time.monotonic()
        process.terminate()
    process.wait(60)
    right = sum(one.whole and one.text == request.expected(one.cached) for one in found)
    seconds = round(time.monotonic() - begun, 1)
    return {"clients": clients, "running": running, "right": right, "seconds": seconds}


def main() -> None:
    args = common.arguments(__doc__, "requests", requests=10_000, seconds=86_400.0, clients=16)
    texts, chats = requests()
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as (client, _):
        answer_alone(client, texts, chats)
    print(f"{len(texts) + 2 * len(chats)} requests are answered alone", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        with server(Path(folder)) as (client, process):
            load = Load(client, texts, chats, args.requests)
            samples: list[tuple[float, float, int]] = []
            begun = time.monotonic()
            with ThreadPoolExecutor(args.clients + 1) as pool:
                works = [pool.submit(watch, process.pid, load.ended, samples)]
                works += [pool.submit(load.ask_on, number) for number in range(args.clients)]
                while not load.ended.wait(min(60, args.seconds)):
                    if time.monotonic() - begun > args.seconds:
                        load.ended.set()
                    counts = dict(collections.Counter(load.counted))
                    state = (counts, len(load.other), len(load.lost))
                    print("counted {}, other {}, lost {}".format(*state), flush=True)
            seconds = time.monotonic() - begun
            for work in works:
                work.result()  # raises what ended it
            request = next(one for one in texts if one.name == "at the end")
            at_the_end = end(client, process, request, args.clients)
        log = (Path(folder) / "log").read_text()
    said = [line.split(" INFO ")[-1] for line in log.splitlines()]
    at_the_end["log"] = [line for line in said if line.startswith(("ending", "ended"))]
    warm = [one for one in samples if one[0] > seconds / 6]
    result = {
        "seconds": round(seconds),
        "clients": args.clients,
        "flags": FLAGS,
        "asked": len(load.asked),
        "answers": dict(collections.Counter(load.counted)),
        "other_answers": load.other,
        "lost": load.lost,
        "sigterm": at_the_end,
        "errors_in_the_log": log.count("Traceback") + log.count("a request has failed"),
        "seconds_to_the_first_token": {
            "streams": len(load.first),
            **{f"p{part}": round(float(np.percentile(load.first, part)), 3) for part in (50, 95)},
        },
        "resident_megabytes": {
            "first": round(samples[0][1], 1), "last": round(samples[-1][1], 1),
            "median_after_a_sixth": round(float(np.median([one[1] for one in warm])), 1),
            "per_hour_after_a_sixth": growth(warm, max(30.0, min(BLOCK, seconds / 12))),
            "each_block": [round(size, 1) for _, size, _ in samples[:: max(1, len(samples) // 12)]],
        },
        "open_files": {"first": samples[0][2], "most": max(one[2] for one in samples),
                       "last": samples[-1][2]},
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    common.save(args.json, result)
    whole = at_the_end["right"] == args.clients
    if load.other or load.lost or not whole or result["errors_in_the_log"]:
        raise SystemExit("answers were lost, mixed up, or failed: see above")


if __name__ == "__main__":
    main()
