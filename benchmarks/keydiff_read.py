"""keydiff's decode step: ranks in attention's own read of the keys, against a second read of them.

    python benchmarks/keydiff_read.py --json benchmarks/results/keydiff_read.json

One layer's cache at its budget, float16 and float32, 8 KV heads of 128, 16 query heads, one row
evicted at every step. The two ways take turns, and the order of turns alternates; beside them is a
window cache, which ranks nothing by keys. Several caches take part in each turn, so that the keys
come from memory and not from a cache of the processor, as the layers of a model do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_h2o import H2OConfig, H2OKVCache, threads
from mlx_h2o.caches import key_ranks
from mlx_h2o.demo import report
from mlx_h2o.lm import attention

HEADS, KV_HEADS, SIZE = 16, 8, 128
WAYS = {"one read": ("keydiff", -1), "second read": ("keydiff", 1 << 60), "window": ("window", 0)}
AT_LEAST = 64 << 20
"""Bytes of keys that the caches of a way hold together."""


class Way:
    """Caches that are full, and steps of all of them."""

    def __init__(self, name: str, rows: int, dtype: mx.Dtype) -> None:
        policy, self.threshold = WAYS[name]
        count = max(1, -(-AT_LEAST // (rows * KV_HEADS * SIZE * dtype.size)))
        self.caches = [H2OKVCache(H2OConfig(max_kv_size=rows, policy=policy)) for _ in range(count)]
        self.dtype = dtype
        self.seconds: list[float] = []
        for cache in self.caches:
            prompt = mx.random.normal((1, KV_HEADS, rows, SIZE)).astype(dtype)
            mx.eval(*cache.update_and_fetch(prompt, prompt))
        self.turn(2)
        self.seconds.clear()

    def turn(self, steps: int) -> None:
        """So many steps of every cache; seconds per step of one."""
        key_ranks.SECOND_READ_BYTES = self.threshold
        queries = mx.random.normal((1, HEADS, 1, SIZE)).astype(self.dtype)
        new = mx.random.normal((1, KV_HEADS, 1, SIZE)).astype(self.dtype)
        mx.eval(queries, new)
        start = time.perf_counter()
        for _ in range(steps):
            for cache in self.caches:
                mx.eval(_step(cache, queries, new))
        self.seconds.append((time.perf_counter() - start) / steps / len(self.caches))


def _step(cache: H2OKVCache, queries: mx.array, new: mx.array) -> mx.array:
    keys, values = cache.update_and_fetch(new, new)
    call = attention.Call.of((queries, keys, values, cache, SIZE**-0.5), {})
    assert call is not None
    return attention.attend(
        call, lambda: mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SIZE**-0.5)
    )


def measure(rows: int, dtype: mx.Dtype, turns: int, steps: int) -> dict[str, Any]:
    ways = {name: Way(name, rows, dtype) for name in WAYS}
    for turn in range(turns):
        for name in WAYS if turn % 2 else reversed(WAYS):
            ways[name].turn(steps)
    pairs = zip(ways["one read"].seconds, ways["second read"].seconds, strict=True)
    ratios = [one / second for one, second in pairs]
    return {
        "rows": rows,
        "dtype": str(dtype).removeprefix("mlx.core."),
        "key_bytes": rows * KV_HEADS * SIZE * dtype.size,
        "microseconds": {name: spread(way.seconds, 1e6) for name, way in ways.items()},
        "one read / second read": spread(ratios),
    }


def spread(values: list[float], factor: float = 1) -> dict[str, float]:
    return {
        "min": round(min(values) * factor, 3),
        "median": round(statistics.median(values) * factor, 3),
        "max": round(max(values) * factor, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    measured = []
    for dtype in (mx.float16, mx.float32):
        for rows in args.rows:
            measured.append(measure(rows, dtype, args.turns, args.steps))
            print(json.dumps(measured[-1]), flush=True)
    result = {
        "environment": {**report.environment(), "threads": threads()},
        "threshold_bytes": SHIPPED,
        "measured": measured,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


SHIPPED = key_ranks.SECOND_READ_BYTES

if __name__ == "__main__":
    main()
