"""A server is started again: how long does the next turn of a text wait for its first token?

    python benchmarks/restart.py --json benchmarks/results/restart.json

Each round starts the server twice with ``--cache-dir`` and twice without. The first one reads a
prompt of so many tokens; the second one is asked to go on behind it, and answers in a stream. What
counts is the time from that request to the first piece of text; in the first round every server
also loads the model then, in each arm alike.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm

import mlx_h2o
from mlx_h2o.evaluation.environment import blas, environment


@contextmanager
def server(flags: list[str]) -> Iterator[int]:
    """The port of a server that answers and has the model in memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "mlx_h2o", "server", "--model", "demo", "--port", str(port)]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                ask(port, "a", 1)
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit("the server ended") from None
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def ask(port: int, prompt: str, tokens: int) -> tuple[float, str, int]:
    """Seconds to the first piece of text, the text, and how many tokens were in a cache."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    begun, first, text, cached = time.perf_counter(), 0.0, "", 0
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            found = json.loads(line[6:])
            for choice in found.get("choices", []):
                text += choice.get("text", "")
                first = first or (time.perf_counter() - begun if text else 0.0)
            details = (found.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens", cached)
    return first, text, cached


def restarted(prompt: str, flags: list[str], folder: Path | None) -> dict[str, Any]:
    """One restart; the prompt's entries are on disk before the first server ends."""
    with server(flags) as port:
        _, answer, _ = ask(port, prompt, 8)
        while folder is not None and len(list(folder.glob("*.json"))) < 2:
            time.sleep(0.05)
    with server(flags) as port:
        seconds, text, cached = ask(port, prompt + answer + " And then", 8)
    return {"seconds": seconds, "text": text, "cached_tokens": cached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1500, help="of the prompt")
    parser.add_argument("--max-kv-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    _, tokenizer = mlx_h2o.load("demo")
    tokens = (tokenizer.encode(mlx_h2o.demo.text()) * 10)[: args.tokens]
    prompt = tokenizer.decode(tokens)
    arms: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
    for _ in tqdm(range(args.rounds)):
        for name, runs in arms.items():
            with tempfile.TemporaryDirectory() if name == "with" else nullcontext() as folder:
                flags = ["--max-kv-size", str(args.max_kv_size)]
                flags += ["--cache-dir", folder] if folder else []
                runs.append(restarted(prompt, flags, Path(folder) if folder else None))
    texts = {run["text"] for runs in arms.values() for run in runs}
    found = {
        "prompt_tokens": args.tokens,
        "max_kv_size": args.max_kv_size,
        "same_text": len(texts) == 1,
        "environment": {**environment(), "blas": blas()},
    }
    for name, runs in arms.items():
        seconds = sorted(run["seconds"] for run in runs)
        found[name] = {
            "cached_tokens": runs[0]["cached_tokens"],
            "seconds": {
                "min": seconds[0], "median": statistics.median(seconds), "max": seconds[-1],
            },
        }  # fmt: skip
    found["ratio"] = found["without"]["seconds"]["median"] / found["with"]["seconds"]["median"]
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
