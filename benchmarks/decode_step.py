"""Speed of decoding at the full budget, against mlx_lm's RotatingKVCache.

    python benchmarks/decode_step.py --json benchmarks/results/decode_step.json

Each arm decodes with mlx_lm's own generate_step, evicting at every token but for the full cache.
The arms take turns of a few tokens within one process, so that what else the machine does meets
all of them, and the order rotates. A ratio compares a turn with the RotatingKVCache's turn of the
same round: above 1 is faster. Beside the time on the wall stands the processor time of the whole
process, which depends less on what else runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import benchmark_models as models
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache

import mlx_h2o
from mlx_h2o.demo import report
from mlx_h2o.evaluation.statistics import spread
from mlx_h2o.operations import native
from mlx_h2o.policies import names

ROTATING = "rotating"
FULL = "full"
PACKED = {f"{policy}, 8 bits": policy for policy in ("keydiff", "h2o", "window")}
"""Arms that are compared with the same policy over dense rows, too."""


class Arm:
    """One kind of cache, and a generation that goes on for as long as it is asked."""

    def __init__(self, name: str, model: Any, budget: int, prompt: mx.array) -> None:
        self.name = name
        self.model = model
        layers = len(model.layers)
        if name == FULL:
            self.caches: list[Any] = [KVCache() for _ in range(layers)]
        elif name == ROTATING:
            self.caches = [RotatingKVCache(budget, keep=4) for _ in range(layers)]
        else:
            bits = {"kv_bits": 8} if name in PACKED else {}
            policy = PACKED.get(name, name)
            self.caches = mlx_h2o.make_prompt_cache(model, budget, policy=policy, **bits)
        self.tokens: Iterator[Any] = generate_step(
            prompt, model, max_tokens=-1, prompt_cache=self.caches
        )
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []

    def routed(self) -> contextlib.AbstractContextManager[None]:
        """Only our caches decode within the context: the others run mlx_lm as it is."""
        ours = self.name not in (FULL, ROTATING)
        return mlx_h2o.routing(self.model) if ours else contextlib.nullcontext()

    def take_turn(self, tokens: int) -> None:
        with self.routed():
            next(self.tokens)  # not counted: it may wait for the arm before
            start, processor = time.perf_counter(), time.process_time()
            for _ in range(tokens):
                next(self.tokens)
            self.seconds.append((time.perf_counter() - start) / tokens)
            self.processor_seconds.append((time.process_time() - processor) / tokens)
            mx.synchronize()


def measure(
    name: str, model: Any, budget: int, tokens: int, repeats: int, wanted: Sequence[str]
) -> dict[str, Any]:
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    vocabulary = model.args.vocab_size
    prompt = (mx.arange(budget + 32) * 7919) % vocabulary
    arms = [Arm(arm, model, budget, prompt) for arm in dict.fromkeys((ROTATING, *wanted))]
    load = os.getloadavg()[0]
    for arm in arms:  # reads the prompt, fills the cache, warms up
        with arm.routed():
            for _ in range(3):
                next(arm.tokens)
            mx.synchronize()
    for repeat in range(repeats):
        for turn in range(len(arms)):
            arms[(repeat + turn) % len(arms)].take_turn(tokens)
    by_name = {arm.name: arm for arm in arms}
    base = by_name[ROTATING]
    results = {}
    for arm in arms:
        evicted = getattr(arm.caches[0], "evicted", None)
        results[arm.name] = {
            "milliseconds_per_token": spread([1e3 * x for x in arm.seconds]),
            "ratio_to_rotating": spread(
                [b / a for a, b in zip(arm.seconds, base.seconds, strict=True)]
            ),
            "processor_ratio_to_rotating": spread(
                [b / a for a, b in zip(arm.processor_seconds, base.processor_seconds, strict=True)]
            ),
            **({} if evicted is None else {"evicted_rows_per_layer": evicted}),
        }
        if PACKED.get(arm.name) in by_name:
            pairs = zip(arm.seconds, by_name[PACKED[arm.name]].seconds, strict=True)
            results[arm.name]["ratio_to_dense"] = spread([dense / ours for ours, dense in pairs])
    return {
        "model": name,
        "parameters": models.parameters(model),
        "max_kv_size": budget,
        "tokens_per_turn": tokens,
        "repeats": repeats,
        "load_average_before_and_after": [round(load, 2), round(os.getloadavg()[0], 2)],
        "arms": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=list(models.MODELS))
    every = [FULL, ROTATING, *names(), *PACKED]
    parser.add_argument("--arms", nargs="+", choices=every, default=every, metavar="ARM",
                        help="what to compare with the rotating cache")  # fmt: skip
    parser.add_argument("--max-kv-size", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=5, help="per turn")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    if arguments.repeats < 5:
        parser.error("expected at least 5 repeats")
    environment = report.environment()
    if not native.unavailable_reason():
        from mlx_h2o import _core

        environment["simd"] = _core.simd_target()
    result: dict[str, Any] = {"environment": environment, "runs": []}
    for name in arguments.models:
        run = measure(
            name, models.MODELS[name](), arguments.max_kv_size, arguments.tokens,
            arguments.repeats, arguments.arms,
        )  # fmt: skip
        result["runs"].append(run)
        print(f"{name}: {run['parameters']:,} parameters, {run['repeats']} repeats, load "
              f"{run['load_average_before_and_after']}")  # fmt: skip
        for arm, found in run["arms"].items():
            wall, processor = found["ratio_to_rotating"], found["processor_ratio_to_rotating"]
            dense = found.get("ratio_to_dense")
            print(
                f"  {arm:16} {found['milliseconds_per_token']['median']:8.2f} ms/token, "
                f"speed {wall['min']:.2f} / {wall['median']:.2f} / {wall['max']:.2f} of rotating, "
                f"by processor time {processor['median']:.2f}"
                + (f", of dense {dense['median']:.2f}" if dense else ""),
                flush=True,
            )
        if arguments.json:  # what is measured so far
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
