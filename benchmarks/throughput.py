"""Our server beside mlx_lm's: answers to 1, 8 and 32 clients at once, and memory under load.

    python benchmarks/throughput.py [--model demo] --json benchmarks/results/throughput.json

Both servers run and take turns: in a round, as many clients ask each of them the same. Results are
tokens per second of all clients together, the median time to the first token, both also as ratios
to mlx_lm's in the same round, and how many clients got no answer. Then 64 clients with prompts of
different lengths ask a server with `--memory`, on each CPU back end: its peak of MLX memory, and
the kept prompts at the end. A model is a directory, or demo in float32: CPUs emulate other types.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import mlx_lm

from lib import common, servers
from mlx_h2o import demo
from mlx_h2o.evaluation.statistics import in_turns, ratios, spread

ARMS = {
    "mlx_lm": ("mlx_lm", ()),
    "ours, no budget": ("mlx_h2o", ("--max-kv-size", "none")),
    "ours, 256 rows": ("mlx_h2o", ("--max-kv-size", "256")),
}
TOKENS, ROUNDS, MEMORY = 48, {1: 41, 8: 15, 32: 11}, 2**31  # rounds by number of clients


def together(port: int, prompts: Sequence[str], tokens: int) -> tuple[float, float, int]:
    """Tokens per second of all clients, the median time to the first token, and how many clients
    got no answer because their connection was reset."""

    def one(prompt: str) -> tuple[float, int] | None:
        try:
            return servers.ask(port, prompt, tokens)
        except OSError:
            return None

    begun = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [*filter(None, pool.map(one, prompts))]
    seconds = time.perf_counter() - begun
    speed = sum(made for _, made in answers) / seconds
    return speed, statistics.median(at for at, _ in answers), len(prompts) - len(answers)


def texts(count: int, start: int, more: int) -> list[str]:
    """Prompts of 60 words and more, each with different words."""
    words = itertools.cycle(demo.text().split())
    found = []
    for place in range(start, start + count):
        taken = itertools.islice(words, 60 + more * (place - start))
        found.append(f"{place}: {' '.join(taken)}")
    return found


def speeds(model: str) -> dict[str, Any]:
    """Results by number of clients and server."""
    with contextlib.ExitStack() as running:
        ports = {
            arm: running.enter_context(servers.server("--model", model, *flags, package=package))[0]
            for arm, (package, flags) in ARMS.items()
        }
        return {str(clients): _speeds(ports, clients) for clients in ROUNDS}


def _speeds(ports: dict[str, int], clients: int) -> dict[str, Any]:
    turn = {arm: itertools.count() for arm in ports}

    def asked(arm: str) -> tuple[float, float, int]:
        prompts = texts(clients, 100 * next(turn[arm]) + clients, 1)
        return together(ports[arm], prompts, TOKENS)

    runs = in_turns({arm: partial(asked, arm) for arm in ports}, ROUNDS[clients])
    found: dict[str, Any] = {}
    for arm, own in runs.items():
        found[arm] = {"without_answer": sum(run[2] for run in own)}
        for at, name in enumerate(("tokens_per_second", "first_token")):
            figures, stock = ([run[at] for run in runs[one]] for one in (arm, "mlx_lm"))
            found[arm] |= {name: spread(figures), f"{name}_to_mlx_lm": ratios(figures, stock)}
        common.show(f"{clients} clients, {arm}", found[arm])
    return found


def peaks(model: str) -> dict[str, Any]:
    found = {}
    for backend in ("native", "composed"):
        flags = ("--model", model, "--memory", str(MEMORY), "--max-kv-size", "256")
        with servers.server(*flags, MLX_H2O_BACKEND=backend) as (port, _):
            together(port, texts(64, 0, 6), 32)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                told = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines())
        peak, kept = (int(float(told[f"mlx_h2o_{n}_bytes"])) for n in ("memory_peak", "snapshot"))
        found[backend] = {"memory": MEMORY, "peak": peak, "snapshots": kept, "clients": 64}
        common.show(backend, found[backend])
    return found


def main() -> None:
    args = common.arguments(__doc__, model="demo")
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model == "demo":
            model = str(Path(folder) / "demo")
            mlx_lm.convert(str(demo.model_path()), model, dtype="float32")
        found = {"model": Path(args.model).name, "tokens": TOKENS, "rounds": [*ROUNDS.values()]}
        common.save(args.json, found | {"peaks": peaks(model), "speeds": speeds(model)})


if __name__ == "__main__":
    main()
