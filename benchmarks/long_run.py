"""A long generation at the full budget: is it as fast at its end, and does nothing grow?

    python benchmarks/long_run.py --json benchmarks/results/long_run.json

The demo model decodes 100,000 tokens into a cache of 256 rows, evicting at every token. At each
checkpoint the old cache takes turns with one that has just become full, so that what else the
machine does meets both: the ratio of their speeds, above 1 where the old one is faster, says
whether steps get slower with age. Resident memory, MLX's own memory, the bytes of the cache and
the scores are read there too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import benchmark_models as models
import mlx.core as mx
from mlx_lm.generate import generate_step
from tqdm import tqdm

import mlx_h2o
from mlx_h2o.demo import report
from mlx_h2o.evaluation.statistics import spread
from mlx_h2o.policies import names


class Run:
    """A generation of the demo model into a cache that is full."""

    def __init__(self, model: Any, budget: int, settings: dict[str, Any]) -> None:
        self.caches = mlx_h2o.make_prompt_cache(model, budget, **settings)
        prompt = (mx.arange(budget + 32) * 7919) % model.args.vocab_size
        self.tokens: Iterator[Any] = generate_step(
            prompt, model, max_tokens=-1, prompt_cache=self.caches
        )

    def take(self, count: int) -> float:
        """Seconds per token of the next ones."""
        next(self.tokens)  # not counted: it may wait for the other run
        start = time.perf_counter()
        for _ in range(count):
            next(self.tokens)
        return (time.perf_counter() - start) / count

    @property
    def offset(self) -> int:
        return int(self.caches[0].offset)


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * 4096 / 1e6, 1)


def checkpoint(old: Run, model: Any, budget: int, settings: dict[str, Any], repeats: int) -> Any:
    resident = resident_megabytes()
    young = Run(model, budget, settings)
    young.take(20)
    ratios = []
    for repeat in range(repeats):
        pair = (old, young) if repeat % 2 else (young, old)
        seconds = {run: run.take(20) for run in pair}
        ratios.append(seconds[young] / seconds[old])
    scores = [cache.scores for cache in old.caches if cache.policy.needs_scores]
    mx.eval(scores)
    # The newest row of a step may still wait for its own.
    finite = all(int(mx.sum(mx.isnan(s)).item()) <= s.shape[0] * s.shape[1] for s in scores)
    return {
        "tokens": old.offset,
        "speed_against_a_young_cache": spread(ratios),
        "resident_megabytes": resident,
        "mlx_active_megabytes": round(mx.get_active_memory() / 1e6, 1),
        "cache_bytes": sum(cache.nbytes for cache in old.caches),
        "rows": old.caches[0].size(),
        "scores_finite": finite and not any(bool(mx.any(mx.isinf(s)).item()) for s in scores),
    }


def measure(settings: dict[str, Any], budget: int, stops: list[int], repeats: int) -> Any:
    model = models.demo_model()
    model.set_dtype(mx.float32)
    found = []
    with mlx_h2o.routing(model):
        old = Run(model, budget, settings)
        with tqdm(total=stops[-1], desc=str(settings), disable=None) as bar:
            for stop in stops:
                while old.offset < stop:
                    old.take(min(500, stop - old.offset))
                    bar.update(old.offset - bar.n)
                found.append(checkpoint(old, model, budget, settings, repeats))
    return {"settings": settings, "max_kv_size": budget, "checkpoints": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--policy", choices=names(), default=mlx_h2o.H2OConfig().policy.name)
    parser.add_argument("--kv-bits", type=int)
    parser.add_argument("--max-kv-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=25, help="pairs of turns per checkpoint")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    if arguments.repeats < 5:
        parser.error("expected at least 5 repeats")
    marks = (1_000, 8_000, 32_000, 64_000)
    stops = [stop for stop in marks if stop < arguments.tokens] + [arguments.tokens]
    settings: dict[str, Any] = {"policy": arguments.policy}
    if arguments.kv_bits is not None:
        settings |= {"kv_bits": arguments.kv_bits, "kv_group_size": 32}
    run = measure(settings, arguments.max_kv_size, stops, arguments.repeats)
    for point in run["checkpoints"]:
        speed = point["speed_against_a_young_cache"]
        print(
            f"{point['tokens']:7} tokens: {speed['min']:.2f} / {speed['median']:.2f} / "
            f"{speed['max']:.2f} of a young cache's speed, {point['resident_megabytes']} MB "
            f"resident, {point['cache_bytes']:,} bytes in the cache, "
            f"scores {'finite' if point['scores_finite'] else 'NOT finite'}"
        )
    if arguments.json:
        result = {"environment": report.environment(), "run": run}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
