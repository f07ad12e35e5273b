"""Our server beside mlx_lm's: answers of 1, 8 and 32 clients at once, and memory under load.

    python benchmarks/throughput.py [--model demo] --json benchmarks/results/throughput.json

Both servers run, and take turns: a round asks each of them the same, as many clients at once. Given
are tokens a second of all clients together, and the median time to a first token, also as ratios to
mlx_lm's of the same round, and how many clients were not answered. Then 64 clients of unlike
lengths ask a server with `--memory`, on each back end of the CPU: the most that its MLX held. A
model is a directory, or demo, whose weights are float32 here: CPUs emulate others.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_h2o import demo
from mlx_h2o.evaluation.environment import blas, environment
from mlx_h2o.evaluation.statistics import spread

ARMS = {
    "mlx_lm": ("mlx_lm", ()),
    "ours, no budget": ("mlx_h2o", ("--max-kv-size", "none")),
    "ours, 256 rows": ("mlx_h2o", ("--max-kv-size", "256")),
}
CLIENTS, TOKENS, ROUNDS, MEMORY = (1, 8, 32), 48, 5, 2**31


@contextlib.contextmanager
def server(
    package: str, model: str, flags: Sequence[str], settings: Mapping[str, str] | None = None
) -> Iterator[int]:
    """The port of a server that has loaded the model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", package, "server", "--model", model, "--port", str(port)]
    process = subprocess.Popen(
        [*command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, **(settings or {})},
    )  # fmt: skip
    try:
        while True:
            with contextlib.suppress(OSError):
                ask(port, "a", 1)
                break
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
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


def together(port: int, prompts: Sequence[str], tokens: int) -> tuple[float, float, int]:
    """Tokens a second of all clients, the median time to a first token, and clients who got no
    answer, whose connection was reset."""

    def one(prompt: str) -> tuple[float, int] | None:
        try:
            return ask(port, prompt, tokens)
        except OSError:
            return None

    begun = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [*filter(None, pool.map(one, prompts))]
    seconds = time.perf_counter() - begun
    speed = sum(made for _, made in answers) / seconds
    return speed, statistics.median(at for at, _ in answers), len(prompts) - len(answers)


def texts(count: int, start: int, more: int) -> list[str]:
    """Prompts of 60 words and more, each of other words."""
    words = itertools.cycle(demo.text().split())
    found = []
    for place in range(start, start + count):
        taken = itertools.islice(words, 60 + more * (place - start))
        found.append(f"{place}: {' '.join(taken)}")
    return found


def speeds(model: str) -> dict[str, Any]:
    with contextlib.ExitStack() as running:
        ports = {
            arm: running.enter_context(server(package, model, flags))
            for arm, (package, flags) in ARMS.items()
        }
        found: dict[str, Any] = {}
        for turn in range(ROUNDS):
            for clients in CLIENTS:
                for arm, port in ports.items():
                    prompts = texts(clients, 100 * turn + clients, 1)
                    of = found.setdefault(str(clients), {}).setdefault(arm, [])
                    of.append(together(port, prompts, TOKENS))
                    print(clients, arm, of[-1], flush=True)
    return {clients: {arm: ratios(runs, arms["mlx_lm"]) for arm, runs in arms.items()}
            for clients, arms in found.items()}  # fmt: skip


def ratios(runs: Sequence[Any], stock: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"without_answer": sum(run[2] for run in runs)}
    for name, at in (("tokens_per_second", 0), ("first_token", 1)):
        found[name] = spread([run[at] for run in runs])
        pairs = zip(runs, stock, strict=True)
        found[f"{name}_to_mlx_lm"] = spread([run[at] / other[at] for run, other in pairs])
    return found


def in_float32(folder: Path) -> str:
    """The demo with other weights, in a folder."""
    shutil.copytree(Path(demo.__file__).parent / "model", folder, dirs_exist_ok=True)
    file = str(folder / "model.safetensors")
    weights = {name: array.astype(mx.float32) for name, array in mx.load(file).items()}
    mx.eval(weights)
    mx.save_safetensors(file, weights)
    return str(folder)


def peaks(model: str) -> dict[str, Any]:
    found = {}
    for backend in ("native", "composed"):
        flags = ("--memory", str(MEMORY), "--max-kv-size", "256")
        with server("mlx_h2o", model, flags, {"MLX_H2O_BACKEND": backend}) as port:
            together(port, texts(64, 0, 6), 32)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                lines = page.read().decode().splitlines()
        (peak,) = (line.split()[1] for line in lines if line.startswith("mlx_h2o_memory_peak"))
        found[backend] = {"memory": MEMORY, "peak": int(float(peak)), "clients": 64}
        print(backend, found[backend], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = in_float32(Path(folder)) if args.model == "demo" else args.model
        found = {
            "model": Path(args.model).name,
            "tokens": TOKENS,
            "rounds": ROUNDS,
            "environment": {**environment(), "blas": blas()},
            "peaks": peaks(model),
            "speeds": speeds(model),
        }
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
