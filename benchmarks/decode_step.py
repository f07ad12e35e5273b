"""Speed of decoding at the full budget, against mlx_lm's RotatingKVCache.

    python benchmarks/decode_step.py --json benchmarks/results/decode_step.json

Each arm decodes with mlx_lm's own generate_step, evicting at every token but for the full cache.
The arms take turns of a few tokens within one process. A ratio compares a turn with the
RotatingKVCache's turn of the same round: above 1 is faster. Beside the time on the wall stands the
processor time of the whole process, which depends less on what else runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import common
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache

import mlx_h2o
from mlx_h2o.evaluation.statistics import in_turns, ratios, spread
from mlx_h2o.policies import names

ROTATING = "rotating"
FULL = "full"
PACKED = {f"{policy}, 8 bits": policy for policy in ("keydiff", "h2o", "window")}
"""Arms that are compared with the same policy over dense rows, too."""


class Arm:
    """One kind of cache, and a generation that goes on for as long as it is asked."""

    def __init__(self, name: str, model: Any, budget: int, prompt: mx.array) -> None:
        self.name, self.model = name, model
        if name == FULL:
            self.caches: list[Any] = [KVCache() for _ in model.layers]
        elif name == ROTATING:
            self.caches = [RotatingKVCache(budget, keep=4) for _ in model.layers]
        else:
            bits = {"kv_bits": 8} if name in PACKED else {}
            policy = PACKED.get(name, name)
            self.caches = mlx_h2o.make_prompt_cache(model, budget, policy=policy, **bits)
        self.tokens: Iterator[Any] = generate_step(
            prompt, model, max_tokens=-1, prompt_cache=self.caches
        )
        self.turn(2)  # reads the prompt, fills the cache, warms up

    def turn(self, tokens: int) -> tuple[float, float]:
        """Seconds of a token, on the wall and of processors."""
        ours = self.name not in (FULL, ROTATING)  # the others run mlx_lm as it is
        with mlx_h2o.routing(self.model) if ours else contextlib.nullcontext():
            next(self.tokens)  # not counted: it may wait for the arm before
            start, processor = time.perf_counter(), time.process_time()
            for _ in range(tokens):
                next(self.tokens)
            taken = time.perf_counter() - start, time.process_time() - processor
            mx.synchronize()
        return taken[0] / tokens, taken[1] / tokens


def measure(
    name: str, budget: int, tokens: int, repeats: int, wanted: Sequence[str]
) -> dict[str, Any]:
    model = common.loaded(name)
    prompt = (mx.arange(budget + 32) * 7919) % model.args.vocab_size
    arms = {arm: Arm(arm, model, budget, prompt) for arm in dict.fromkeys((ROTATING, *wanted))}
    turns = in_turns({arm: partial(one.turn, tokens) for arm, one in arms.items()}, repeats)
    wall, processor = ({arm: [one[at] for one in turns[arm]] for arm in arms} for at in (0, 1))
    results: dict[str, Any] = {}
    for arm, one in arms.items():
        found = results[arm] = {
            "milliseconds_per_token": spread([1e3 * seconds for seconds in wall[arm]]),
            "ratio_to_rotating": ratios(wall[ROTATING], wall[arm]),
            "processor_ratio_to_rotating": ratios(processor[ROTATING], processor[arm]),
        }
        if hasattr(one.caches[0], "evicted"):
            found["evicted_rows_per_layer"] = one.caches[0].evicted
        if PACKED.get(arm) in arms:
            found["ratio_to_dense"] = ratios(wall[PACKED[arm]], wall[arm])
        common.show(f"{name}, {arm}", found)
    return {
        "model": name, "parameters": common.parameters(model), "max_kv_size": budget,
        "tokens_per_turn": tokens, "repeats": repeats, "arms": results,
    }  # fmt: skip


def main() -> None:
    args = common.arguments(
        __doc__, models=(*common.MODELS,), arms=(FULL, ROTATING, *names(), *PACKED),
        max_kv_size=256, tokens=5, repeats=40,
    )  # fmt: skip
    runs = []
    for name in args.models:
        runs.append(measure(name, args.max_kv_size, args.tokens, args.repeats, args.arms))
        common.save(args.json, {"runs": runs})  # what is measured so far


if __name__ == "__main__":
    main()
