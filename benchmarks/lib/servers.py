"""Start a server in its own process, and ask it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def server(
    *flags: str, package: str = "mlx_h2o", log: str | Path = os.devnull, **environment: str
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Port and process of a server that has loaded its model; SIGTERM ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", package, "server", "--port", str(port), *flags]
    with Path(log).open("wb") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, env={**os.environ, **environment}
        )
    try:
        while True:
            with contextlib.suppress(OSError):
                ask(port, "a", 1)
                break
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: see {log}")
            time.sleep(0.2)
        yield port, process
        process.terminate()
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def ask(port: int, prompt: str, tokens: int) -> tuple[float, int]:
    """Seconds to the first piece of an answer, and its tokens."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    begun, first, made = time.perf_counter(), 0.0, 0
    with urllib.request.urlopen(request, timeout=1200) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                found = json.loads(line[6:])
                first = first or time.perf_counter() - begun
                made = (found.get("usage") or {}).get("completion_tokens", made)
    return first, made
