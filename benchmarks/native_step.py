"""The native decode step with eviction at every token, against one that neither scores nor chooses.

    python benchmarks/native_step.py --json benchmarks/results/native_step.json

"fused": `attention_and_accumulate`, which names the row that goes next, then `replace_worst` with
that row. "fixed": attention without scores, then `replace_worst` of a slot that is always the
same. Both write one row of K and V per step; the ratio is what scores, moving average and choice
cost. Cold: each step takes the next of a ring of caches of at least 256 MB together, as the layers
of a model do; warm: one cache again and again. The arms take turns within one process, in an order
that rotates; a ratio compares turns of the same round.

Then `quantize_append` and `prefill_scores`, native against composed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlx_h2o
from mlx_h2o import fast, use_backend
from mlx_h2o.demo import report
from mlx_h2o.operations import native
from mlx_h2o.operations.validate import AttentionRequest, attention_request

HEADS, KV_HEADS, SIZE = 16, 8, 128
SCALE = SIZE**-0.5
RING_BYTES = 256 << 20
FORMATS: dict[str, int | None] = {"float16": None, "8-bit": 8, "4-bit": 4}
ROWS = (256, 1024, 4096, 16384)
# The most that the fused step may cost, as a multiple of the fixed one, cold.
BARS = {
    (256, "float16"): 1.15,
    (256, "8-bit"): 1.15,
    (256, "4-bit"): 1.15,
    **{(rows, "float16"): 1.03 for rows in ROWS[2:]},
    **{(rows, "8-bit"): 1.05 for rows in ROWS[2:]},
    **{(rows, "4-bit"): 1.08 for rows in ROWS[2:]},
}


class Cache:
    """Rows of one layer at its budget."""

    def __init__(self, rows: int, bits: int | None) -> None:
        shape = (1, KV_HEADS, rows, SIZE)
        dense = [mx.random.normal(shape).astype(mx.float16) for _ in "kv"]
        self.options: dict[str, Any] = {} if bits is None else {"bits": bits, "group_size": 64}
        self.keys, self.values = (
            dense if bits is None else [tuple(mx.quantize(a, **self.options)) for a in dense]
        )
        self.importance = mx.random.uniform(shape=(1, KV_HEADS, rows))
        self.positions = mx.contiguous(
            mx.broadcast_to(mx.arange(rows, dtype=mx.int32), (1, KV_HEADS, rows))
        )
        self.worst = mx.zeros((1, KV_HEADS), mx.uint32)
        self.now = rows
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        parts = [*self.keys, *self.values] if self.options else [self.keys, self.values]
        return [*parts, self.importance, self.positions]

    def replace(self, row: mx.array, worst: mx.array) -> None:
        self.keys, self.values, self.importance, self.positions = fast.replace_worst(
            self.keys, self.values, self.importance, self.positions, row, row,
            position=self.now, worst=worst, **self.options,
        )  # fmt: skip
        self.now += 1

    def fused(self, query: mx.array, row: mx.array) -> mx.array:
        self.replace(row, self.worst)
        out, self.importance, self.worst = fast.attention_and_accumulate(
            query, self.keys, self.values, self.importance, scale=SCALE, decay=0.95,
            positions=self.positions, sink_size=4, recent_start=self.now + 1 - self.now // 2,
            **self.options,
        )  # fmt: skip
        return out

    def fixed(self, query: mx.array, row: mx.array) -> mx.array:
        self.replace(row, FIXED)
        if not self.options:
            request = AttentionRequest(query, self.keys, self.values, SCALE, return_scores=False)
            return native.attention(request)[0]
        packed = attention_request(
            query,
            self.keys,
            self.values,
            scale=SCALE,
            packed=True,
            return_scores=False,
            **self.options,
        )
        return native.attention(packed)[0]


FIXED = mx.full((1, KV_HEADS), 5, mx.uint32)


def seconds_per_step(caches: list[Cache], arm: str, steps: int) -> float:
    """The graph is built before the clock starts, as mlx_lm builds it while the last one runs; but
    where there is one cache, step by step, or the next step would find its rows in use."""
    query = mx.random.normal((1, HEADS, 1, SIZE)).astype(mx.float16)
    row = mx.random.normal((1, KV_HEADS, 1, SIZE)).astype(mx.float16)
    mx.eval(query, row)
    elapsed = 0.0
    together = len(caches)
    for _ in range(steps // together):
        outs = [getattr(cache, arm)(query, row) for cache in caches]
        start = time.perf_counter()
        mx.eval(outs)
        elapsed += time.perf_counter() - start
    return elapsed / (steps // together * together)


def spread(values: list[float], digits: int = 3) -> dict[str, float]:
    ordered = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(value, digits) for name, value in ordered.items()}


def measure_step(rows: int, kind: str, repeats: int) -> dict[str, Any]:
    bits = FORMATS[kind]
    first = Cache(rows, bits)
    size = sum(array.nbytes for array in first.arrays())
    ring = [first, *(Cache(rows, bits) for _ in range(-(-RING_BYTES // size) - 1))]
    result: dict[str, Any] = {"rows": rows, "format": kind, "caches": len(ring), "bytes": size}
    arms = ("fused", "fixed")
    for threads in (1, 2):
        mlx_h2o.set_threads(threads)
        for name, caches, steps in (
            ("cold", ring, len(ring)),
            ("warm", ring[:1], max(8, min(200, (64 << 20) // size))),
        ):
            times: dict[str, list[float]] = {arm: [] for arm in arms}
            for arm in arms:
                seconds_per_step(caches, arm, steps)
            for repeat in range(repeats):
                for arm in arms[:: 1 if repeat % 2 else -1]:
                    times[arm].append(seconds_per_step(caches, arm, steps))
            ratios = [a / b for a, b in zip(times["fused"], times["fixed"], strict=True)]
            result[f"{name}, {threads} threads"] = {
                "ratio": spread(ratios),
                **{f"{arm}_microseconds": spread([1e6 * t for t in times[arm]], 1) for arm in arms},
            }
    mlx_h2o.set_threads(None)
    bar = BARS.get((rows, kind))
    return result if bar is None else {**result, "bar, cold": bar}


def compared(call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """One call on both back ends in turns: composed over native, above 1 is faster."""
    times: dict[str, list[float]] = {"native": [], "composed": []}
    for repeat in range(repeats + 1):
        for name, found in times.items():
            with use_backend(name):
                result = call()
                start = time.perf_counter()
                mx.eval(result)
                elapsed = time.perf_counter() - start
            if repeat > 0:
                found.append(elapsed)
    ratios = [a / b for a, b in zip(times["composed"], times["native"], strict=True)]
    return {
        "speed_up": spread(ratios, 1),
        **{f"{name}_milliseconds": spread([1e3 * t for t in t_]) for name, t_ in times.items()},
    }


def measure_append(bits: int, new_rows: int, repeats: int) -> dict[str, Any]:
    shape = (1, KV_HEADS, 4096, SIZE)
    options: dict[str, Any] = {"bits": bits, "group_size": 64}
    zeros = mx.zeros(shape, mx.float16)
    rows = mx.random.normal((1, KV_HEADS, new_rows, SIZE)).astype(mx.float16)
    slots = mx.broadcast_to(mx.arange(new_rows, dtype=mx.uint32), (1, KV_HEADS, new_rows))
    stored = {"now": [tuple(mx.quantize(zeros, **options)) for _ in "kv"]}
    mx.eval(stored["now"], rows, slots)

    def append() -> list[Any]:
        stored["now"] = list(fast.quantize_append(*stored["now"], rows, rows, slots, **options))
        return stored["now"]

    found = compared(append, repeats)
    return {"operation": "quantize_append", "bits": bits, "new_rows": new_rows, **found}


def measure_prefill(kind: Any, queries: int, rows: int, repeats: int) -> dict[str, Any]:
    q = mx.random.normal((1, HEADS, queries, SIZE)).astype(mx.float16)
    k = mx.random.normal((1, KV_HEADS, rows, SIZE)).astype(mx.float16)
    mx.eval(q, k)
    found = compared(
        lambda: fast.prefill_scores(q, k, scale=SCALE, mask="causal", kind=kind), repeats
    )
    return {"operation": "prefill_scores", "kind": kind, "queries": queries, "rows": rows, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    if arguments.repeats < 5:
        parser.error("expected at least 5 repeats")
    reason = native.unavailable_reason()
    if reason:
        parser.error(f"the native back end is not available: {reason}")
    from mlx_h2o import _core

    load = os.getloadavg()[0]
    result: dict[str, Any] = {
        "environment": {**report.environment(), "simd": _core.simd_target()},
        "shape": {"B": 1, "Hq": HEADS, "Hkv": KV_HEADS, "D": SIZE, "Lq": 1},
        "ring_bytes": RING_BYTES,
        "repeats": arguments.repeats,
        "steps": [],
        "against composed": [],
    }
    with use_backend("native"):
        for rows in arguments.rows:
            for kind in arguments.formats:
                found = measure_step(rows, kind, arguments.repeats)
                result["steps"].append(found)
                for name, each in found.items():
                    if isinstance(each, dict):
                        ratio = each["ratio"]
                        print(
                            f"N={rows:6} {kind:8} {name:16} {ratio['min']:.3f} / "
                            f"{ratio['median']:.3f} / {ratio['max']:.3f}, bar "
                            f"{found.get('bar, cold', '-')}, "
                            f"{each['fused_microseconds']['median']:.0f} us"
                        )
    few = max(5, arguments.repeats // 2)
    others = [measure_append(bits, n, few) for bits in (8, 4) for n in (1, 512)]
    others += [measure_prefill(kind, 512, 2048, few) for kind in ("ema", "mass")]
    for found in others:
        speed = found["speed_up"]
        print({k: v for k, v in found.items() if not isinstance(v, dict)}, "speed-up", speed)
    result["against composed"] = others
    result["load_average_before_and_after"] = [round(load, 2), round(os.getloadavg()[0], 2)]
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
