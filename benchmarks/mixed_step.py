"""Time of one decoding step of one layer, evicting at every token, by the precision of its rows.

    python benchmarks/mixed_step.py --json benchmarks/results/mixed_step.json

A step is an update, its attention and the evaluation of the output. Arms take turns within one
process, and the order rotates; a ratio compares a turn with that of the 8-bit cache in the same
round: above 1 is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from figures import spread

from mlx_h2o import H2OConfig
from mlx_h2o.caches.quantized import evicting_cache
from mlx_h2o.demo import report

BASE = "8 bits"
ARMS: dict[str, dict[str, Any]] = {
    "dense": {},
    BASE: {"kv_bits": 8},
    "8 and 4 bits by rank, newest 32 dense": {"kv_bits": 8, "light_bits": 4},
    "K8/V4, newest 32 dense": {"kv_bits": 8, "v_bits": 4, "dense_size": 32},
}
HEADS, KV_HEADS, SIZE = 16, 8, 128


class Arm:
    """One cache, full, and tokens to feed it."""

    def __init__(self, policy: str, rows: int, settings: dict[str, Any], tokens: list[Any]) -> None:
        self.cache = evicting_cache(H2OConfig(max_kv_size=rows, policy=policy, **settings))
        self.tokens = tokens
        self.seconds: list[float] = []
        self.run(rows + 8)

    def run(self, count: int) -> None:
        for step in range(count):
            queries, keys, values = self.tokens[step % len(self.tokens)]
            rows = self.cache.update_and_fetch(keys, values)
            mx.eval(self.cache.attend(queries, *rows, scale=SIZE**-0.5))

    def take_turn(self, count: int) -> None:
        start = time.perf_counter()
        self.run(count)
        self.seconds.append((time.perf_counter() - start) / count)


def measure(policy: str, rows: int, steps: int, repeats: int, tokens: list[Any]) -> dict[str, Any]:
    arms = {name: Arm(policy, rows, settings, tokens) for name, settings in ARMS.items()}
    names = list(arms)
    for repeat in range(repeats):
        for turn in range(len(names)):
            arms[names[(repeat + turn) % len(names)]].take_turn(steps)
    base = arms[BASE].seconds
    return {
        "policy": policy,
        "rows": rows,
        "arms": {
            name: {
                "microseconds": spread([1e6 * one for one in arm.seconds], 3),
                "ratio_to_8_bits": spread(
                    [a / b for a, b in zip(arm.seconds, base, strict=True)], 3
                ),
                "nbytes": arm.cache.nbytes,
            }
            for name, arm in arms.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policies", nargs="+", default=["h2o", "keydiff", "window"])
    parser.add_argument("--rows", nargs="+", type=int, default=[256, 2048])
    parser.add_argument("--steps", type=int, default=40, help="per turn")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    if arguments.repeats < 5:
        parser.error("expected at least 5 repeats")
    load = os.getloadavg()[0]
    tokens = [
        tuple(mx.random.normal((1, heads, 1, SIZE)).astype(mx.float16)
              for heads in (HEADS, KV_HEADS, KV_HEADS))
        for _ in range(64)
    ]  # fmt: skip
    mx.eval(tokens)
    runs = []
    for rows in arguments.rows:
        for policy in arguments.policies:
            run = measure(policy, rows, arguments.steps, arguments.repeats, tokens)
            runs.append(run)
            print(f"{policy}, {rows} rows")
            for name, found in run["arms"].items():
                times, ratio = found["microseconds"], found["ratio_to_8_bits"]
                print(
                    f"  {name:40} {times['median']:8.1f} us, "
                    f"{ratio['min']:.2f} / {ratio['median']:.2f} / {ratio['max']:.2f} of 8 bits"
                )
    if arguments.json:
        result = {
            "environment": report.environment(),
            "shape": {"B": 1, "Hq": HEADS, "Hkv": KV_HEADS, "D": SIZE, "dtype": "float16"},
            "steps_per_turn": arguments.steps,
            "repeats": arguments.repeats,
            "load_average_before_and_after": [round(load, 2), round(os.getloadavg()[0], 2)],
            "runs": runs,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
