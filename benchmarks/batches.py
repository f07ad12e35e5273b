"""Speed of decoding batches at the full budget, against mlx_lm's own caches.

    python benchmarks/batches.py --json benchmarks/results/batches.json

Each arm is mlx_lm's own BatchGenerator with sequences of unequal lengths, all beyond the budget, so
that every sequence evicts at every token but in the full cache. The arms take turns of a few tokens
within one process, and the order rotates. A ratio compares a turn with that of the rotating
caches in the same round: above 1 is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import benchmark_models as models
import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, RotatingKVCache

import mlx_h2o
from mlx_h2o.demo import report
from mlx_h2o.evaluation.statistics import spread

FULL, ROTATING = "full", "rotating"
SETTINGS: dict[str, dict[str, Any]] = {
    "h2o-ema": {"policy": "h2o-ema"},
    "window": {"policy": "window"},
    "keydiff": {"policy": "keydiff"},
    "keydiff 8-bit": {"policy": "keydiff", "kv_bits": 8},
}


class Arm:
    """One kind of cache, and a batch that goes on for as long as it is asked."""

    def __init__(self, name: str, model: Any, budget: int, prompts: list[list[int]]) -> None:
        self.name = name
        self.model = model
        self.batch = BatchGenerator(model, max_tokens=1 << 30)
        self.batch.insert(prompts, caches=[self._caches(budget) for _ in prompts])
        self.milliseconds: list[float] = []

    def _caches(self, budget: int) -> list[Any]:
        layers = len(self.model.layers)
        if self.name == FULL:
            return [KVCache() for _ in range(layers)]
        if self.name == ROTATING:
            return [RotatingKVCache(budget, keep=4) for _ in range(layers)]
        return mlx_h2o.make_prompt_cache(self.model, budget, **SETTINGS[self.name])

    def routed(self) -> contextlib.AbstractContextManager[None]:
        """Only our caches decode within the context: the others run mlx_lm as it is."""
        ours = self.name in SETTINGS
        return mlx_h2o.routing(self.model) if ours else contextlib.nullcontext()

    def step(self, sequences: int) -> None:
        found = len(self.batch.next_generated())
        assert found == sequences, f"{self.name}: {found} of {sequences} sequences"

    def take_turn(self, tokens: int, sequences: int) -> None:
        with self.routed():  # once, as a server that stays within it
            self.step(sequences)  # not counted: it may wait for the arm before
            start = time.perf_counter()
            for _ in range(tokens):
                self.step(sequences)
            self.milliseconds.append(1e3 * (time.perf_counter() - start) / tokens)
        mx.synchronize()


def measure(
    name: str, model: Any, sequences: int, budget: int, tokens: int, repeats: int
) -> dict[str, Any]:
    vocabulary = model.args.vocab_size
    lengths = [budget + 8 + 5 * index for index in range(sequences)]
    prompts = [[(7919 * place) % vocabulary for place in range(length)] for length in lengths]
    arms = [Arm(arm, model, budget, prompts) for arm in (FULL, ROTATING, *SETTINGS)]
    load = os.getloadavg()[0]
    for arm in arms:  # reads the prompts, fills the caches, warms up
        for _ in range(3):
            with arm.routed():
                arm.batch.next_generated()
    for repeat in range(repeats):
        for turn in range(len(arms)):
            arms[(repeat + turn) % len(arms)].take_turn(tokens, sequences)
    base = next(arm for arm in arms if arm.name == ROTATING)
    found = {}
    for arm in arms:
        pairs = zip(arm.milliseconds, base.milliseconds, strict=True)
        found[arm.name] = {
            "milliseconds_per_step": spread(arm.milliseconds),
            "ratio_to_rotating": spread([rotating / own for own, rotating in pairs]),
            "bytes": sum(cache.nbytes for cache in arm.batch._generation_batch.prompt_cache),
        }
        arm.batch.close()
    return {
        "model": name,
        "sequences": sequences,
        "max_kv_size": budget,
        "tokens_per_turn": tokens,
        "repeats": repeats,
        "load_average_before_and_after": [round(load, 2), round(os.getloadavg()[0], 2)],
        "arms": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=models.MODELS, default="demo")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--max-kv-size", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=10, help="per turn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    if arguments.repeats < 5:
        parser.error("expected at least 5 repeats")
    model = models.MODELS[arguments.model]()
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    result: dict[str, Any] = {"environment": report.environment(), "runs": []}
    for sequences in arguments.sequences:
        given = (arguments.max_kv_size, arguments.tokens, arguments.repeats)
        run = measure(arguments.model, model, sequences, *given)
        result["runs"].append(run)
        print(f"{sequences} sequences, load {run['load_average_before_and_after']}")
        for arm, found in run["arms"].items():
            ratio = found["ratio_to_rotating"]
            print(
                f"  {arm:14} {found['milliseconds_per_step']['median']:8.2f} ms/step, speed "
                f"{ratio['min']:.2f} / {ratio['median']:.2f} / {ratio['max']:.2f} of rotating, "
                f"{found['bytes']:,} bytes"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
