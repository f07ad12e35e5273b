"""keydiff's decode step: ranks in attention's own read of the keys, against a second read of them.

    python benchmarks/keydiff_read.py --json benchmarks/results/keydiff_read.json

One layer's cache at its budget, float16 and float32, 8 KV heads of 128, 16 query heads. Four
patterns of steps: one row evicted at every token; 16 rows at every 16th; a batch of 4 sequences,
one row of each at every token; and rounds of 4 tokens of which one is taken back, as drafts are.
The two ways take turns, and the order of turns alternates; beside them is a window cache, which
ranks nothing by keys. Several caches take part in each turn, so that the keys come from memory and
not from a cache of the processor, as the layers of a model do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_h2o import H2OConfig, H2OKVCache, threads
from mlx_h2o.caches import key_ranks
from mlx_h2o.caches.speculative_cache import cache_of
from mlx_h2o.demo import report
from mlx_h2o.lm import attention

HEADS, KV_HEADS, SIZE = 16, 8, 128
WAYS = {"one read": ("keydiff", -1), "second read": ("keydiff", 1 << 60), "window": ("window", 0)}
SHIPPED = {
    name: getattr(key_ranks, name)
    for name in ("SECOND_READ_BYTES", "GROUP_READ_BYTES", "DRAFT_READ_BYTES")
}
DTYPES = {"float16": mx.float16, "float32": mx.float32}
AT_LEAST = 64 << 20
"""Bytes of keys that the caches of a way hold together."""


PATTERNS = ("token", "groups of 16", "batch of 4", "drafts")
"""How rows come and go."""


class Way:
    """Caches that are full, and steps of all of them."""

    def __init__(self, name: str, pattern: str, rows: int, dtype: mx.Dtype) -> None:
        policy, self.threshold = WAYS[name]
        self.pattern, self.dtype = pattern, dtype
        self.batch = 4 if pattern == "batch of 4" else 1
        self.tokens = 4 if pattern == "drafts" else 1
        config = H2OConfig(
            max_kv_size=rows,
            policy=policy,
            evict_every=16 if pattern == "groups of 16" else 1,
            speculative=3 if pattern == "drafts" else 0,
        )
        count = max(1, -(-AT_LEAST // (self.batch * rows * KV_HEADS * SIZE * dtype.size)))
        self.caches = [self._full(config, rows) for _ in range(count)]
        self.seconds: list[float] = []
        self.turn({"drafts": 8, "groups of 16": 16}.get(pattern, 2))
        self.seconds.clear()

    def _full(self, config: H2OConfig, rows: int) -> Any:
        def one() -> H2OKVCache:
            cache = cache_of(config)
            prompt = mx.random.normal((1, KV_HEADS, rows, SIZE)).astype(self.dtype)
            mx.eval(*cache.update_and_fetch(prompt, prompt))
            return cache

        return one() if self.batch == 1 else H2OKVCache.merge([one() for _ in range(self.batch)])

    def turn(self, steps: int) -> None:
        """So many steps of every cache; seconds per step of one."""
        for name in SHIPPED:
            setattr(key_ranks, name, self.threshold)
        shape = (self.batch, HEADS, self.tokens, SIZE)
        queries = mx.random.normal(shape).astype(self.dtype)
        new = mx.random.normal((self.batch, KV_HEADS, *shape[2:])).astype(self.dtype)
        mx.eval(queries, new)
        start = time.perf_counter()
        for _ in range(steps):
            for cache in self.caches:
                mx.eval(_step(cache, queries, new))
                if self.pattern == "drafts":
                    cache.trim(1)
        self.seconds.append((time.perf_counter() - start) / steps / len(self.caches))


def _step(cache: Any, queries: mx.array, new: mx.array) -> mx.array:
    keys, values = cache.update_and_fetch(new, new)
    mask = None if new.shape[2] == 1 else "causal"
    call = attention.Call.of((queries, keys, values, cache, SIZE**-0.5, mask), {})
    assert call is not None
    return attention.attend(
        call,
        lambda: mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=SIZE**-0.5, mask=mask
        ),
    )


def measure(pattern: str, rows: int, dtype: mx.Dtype, turns: int, steps: int) -> dict[str, Any]:
    ways = {name: Way(name, pattern, rows, dtype) for name in WAYS}
    steps *= 4 if pattern == "groups of 16" else 1  # all ways through as many evictions
    for turn in range(turns):
        for name in WAYS if turn % 2 else reversed(WAYS):
            ways[name].turn(steps)
    pairs = zip(ways["one read"].seconds, ways["second read"].seconds, strict=True)
    ratios = [one / second for one, second in pairs]
    return {
        "pattern": pattern,
        "rows": rows,
        "dtype": str(dtype).removeprefix("mlx.core."),
        "key_bytes": ways["window"].batch * rows * KV_HEADS * SIZE * dtype.size,
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
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    measured = []
    for pattern, dtype, rows in itertools.product(args.patterns, args.dtypes, args.rows):
        measured.append(measure(pattern, rows, DTYPES[dtype], args.turns, args.steps))
        print(json.dumps(measured[-1]), flush=True)
    result = {
        "environment": {**report.environment(), "threads": threads()},
        "threshold_bytes": SHIPPED,
        "measured": measured,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
