"""Memory and time of an unbounded cache's rows: room that grows, room taken at once, and by pages.

    python benchmarks/preallocation.py --json benchmarks/results/preallocation.json

Rows of one layer come one by one, up to the reserved number. `grows`: 256 rows of room at a time,
each time a copy, as mlx_lm's caches do. `doubles`: twice the room each time. `at once`: zeros for
all rows, which is what preallocation is where pages are not the kernel's. `pages`: memory that is
taken as rows are written. Each arm is a process of its own. What is counted is resident memory
beyond that before the first row, and its peak; and the time of the appends, of which the slowest
says what growth costs.

What a pool of reserved memory could save is the time that a reservation takes: that of a new
cache's first row with `pages`, against one that `grows`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_h2o import H2OConfig, H2OKVCache
from mlx_h2o.evaluation.environment import environment
from mlx_h2o.operations.backends import use_backend

HEADS, SIZE = 8, 128
POINTS = (256, 1024, 4096, 8192, 16384)
ARMS = ("grows", "doubles", "at once", "pages")
NEW = 100
"""Caches of each kind, in a round."""


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Doubling:
    """As mlx_lm's cache, but for the room, which doubles."""

    def __init__(self) -> None:
        self.parts: list[mx.array] = []
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        if not self.parts or self.offset == self.parts[0].shape[2]:
            more = mx.zeros((1, HEADS, max(256, self.offset), SIZE), keys.dtype)
            self.parts = [
                mx.concatenate([part, more], axis=2) for part in self.parts or [more[:, :, :0]] * 2
            ]
        end = self.offset + 1
        for part, row in zip(self.parts, (keys, values), strict=True):
            part[:, :, self.offset : end] = row
        self.offset = end
        return [part[:, :, :end] for part in self.parts]


def measure(arm: str, tokens: int, sender: Any) -> None:
    """Fill one cache; in a process of its own."""
    ahead = tokens if arm in ("at once", "pages") else False
    config = H2OConfig.of(max_kv_size=None, policy="window", preallocate=ahead)
    cache: Any = Doubling() if arm == "doubles" else H2OKVCache(config)
    row = mx.random.normal((1, HEADS, 1, SIZE)).astype(mx.float16)
    mx.eval(row)
    with use_backend("composed" if arm == "at once" else "native"):
        base, peak, points, times = resident(), 0, {}, []
        for count in range(1, tokens + 1):
            start = time.perf_counter()
            mx.eval(cache.update_and_fetch(row, row))
            times.append(time.perf_counter() - start)
            peak = max(peak, resident() - base)
            if count in POINTS:
                points[count] = resident() - base
    sender.send(
        {
            "resident": points,
            "peak": peak,
            "median": statistics.median(times),
            # Of 16 appends that are not the first one, the slowest.
            "slowest": sorted(times[1:])[-16] if len(times) > 16 else max(times),
        }
    )


def first_rows(tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds from a new cache to its first row, both kinds in turn, and the ratio of each round's
    medians."""
    row = mx.random.normal((1, HEADS, 1, SIZE)).astype(mx.float16)
    mx.eval(row)
    medians: dict[str, list[float]] = {"grows": [], "pages": []}
    with use_backend("native"):
        for _ in range(rounds):
            times: dict[str, list[float]] = {arm: [] for arm in medians}
            for _ in range(NEW):
                for arm, ahead in (("grows", False), ("pages", tokens)):
                    config = H2OConfig.of(max_kv_size=None, policy="window", preallocate=ahead)
                    start = time.perf_counter()
                    mx.eval(H2OKVCache(config).update_and_fetch(row, row))
                    times[arm].append(time.perf_counter() - start)
            for arm, found in times.items():
                medians[arm].append(statistics.median(found))
    ratios = [
        pages / grows for pages, grows in zip(medians["pages"], medians["grows"], strict=True)
    ]
    return {
        "seconds": {arm: statistics.median(found) for arm, found in medians.items()},
        "pages_of_grows": [min(ratios), statistics.median(ratios), max(ratios)],
    }


def run(tokens: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[Any]] = {arm: [] for arm in ARMS}
    context = multiprocessing.get_context("spawn")
    for _ in range(rounds):
        for arm in ARMS:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=measure, args=(arm, tokens, sender))
            process.start()
            found[arm].append(receiver.recv())
            process.join()
    return {arm: summary(results, found["grows"]) for arm, results in found.items()}


def summary(results: list[Any], peers: list[Any]) -> dict[str, Any]:
    ratios = [one["slowest"] / peer["slowest"] for one, peer in zip(results, peers, strict=True)]
    return {
        "resident": results[0]["resident"],
        "peak": max(one["peak"] for one in results),
        "slowest_over_median": statistics.median(r["slowest"] / r["median"] for r in results),
        "slowest_of_grows": [min(ratios), statistics.median(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=POINTS[-1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = run(args.tokens, args.rounds)
    row = 2 * HEADS * SIZE * 2
    print(f"rows of {row} bytes; MB in memory at so many tokens, and at most")
    for arm, one in found.items():
        cells = " ".join(f"{count}: {size / 1e6:.1f}" for count, size in one["resident"].items())
        low, middle, high = one["slowest_of_grows"]
        print(f"{arm:8} {cells}  peak {one['peak'] / 1e6:.1f}  slowest append "
              f"{one['slowest_over_median']:.1f} of the median, {low:.2f} {middle:.2f} {high:.2f} "
              "of growing")  # fmt: skip
    first = first_rows(args.tokens, args.rounds)
    print("first row of a new cache, pages of growing: {:.2f} {:.2f} {:.2f}".format(
        *first["pages_of_grows"]))  # fmt: skip
    if args.json:
        settings = {"tokens": args.tokens, "rounds": args.rounds, "bytes_of_a_row": row}
        whole = {"environment": environment(), **settings, "arms": found, "first_row": first}
        args.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
