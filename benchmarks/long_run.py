"""A long generation at the full budget: does it stay as fast, and does nothing grow?

    python benchmarks/long_run.py --json benchmarks/results/long_run.json

The demo model decodes 100,000 tokens into a cache of 256 rows, evicting at every token. At each
checkpoint the old cache takes turns with one that has just become full: the ratio of their speeds,
above 1 if the old one is faster, shows whether steps get slower with age. Checkpoints also record
resident memory, MLX's own memory, the bytes of the cache, and whether scores are finite.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
from decode_step import maker, prompt_of

from lib import common
from mlx_h2o.evaluation.speed import Timed
from mlx_h2o.evaluation.statistics import in_turns, ratios

MARKS = (1_000, 8_000, 32_000, 64_000)


def begun(model: Any, arm: str, budget: int) -> Timed:
    """An arm that has processed its prompt."""
    found = Timed(model, maker(arm, model, budget), prompt_of(model, budget))
    found.read()
    found.write(20)
    return found


def checkpoint(old: Timed, young: Timed, repeats: int) -> dict[str, Any]:
    in_turns({"young": partial(young.write, 20), "old": partial(old.write, 20)}, repeats)
    scores = [cache.scores for cache in old.caches if cache.policy.needs_scores]
    mx.eval(scores)
    # The newest row may still wait for its first score.
    finite = all(int(mx.sum(mx.isnan(s)).item()) <= s.shape[0] * s.shape[1] for s in scores)
    return {
        "tokens": int(old.caches[0].offset),
        "speed_against_a_young_cache": ratios(young.decode[-repeats:], old.decode[-repeats:]),
        "resident_megabytes": round(common.memory("VmRSS") / 1e6, 1),
        "mlx_active_megabytes": round(mx.get_active_memory() / 1e6, 1),
        "cache_bytes": sum(cache.nbytes for cache in old.caches),
        "rows": old.caches[0].size(),
        "scores_finite": finite and not any(bool(mx.any(mx.isinf(s)).item()) for s in scores),
    }


def main() -> None:
    args = common.arguments(__doc__, tokens=100_000, policy="keydiff", max_kv_size=256, repeats=25)
    model = common.loaded("demo")
    given = model, args.policy, args.max_kv_size
    old, found = begun(*given), []
    for stop in sorted({min(mark, args.tokens) for mark in (*MARKS, args.tokens)}):
        while (left := stop - old.caches[0].offset) > 1:
            old.write(min(500, left - 1))
        found.append(checkpoint(old, begun(*given), args.repeats))
        common.show(args.policy, found[-1])
    settings = {"policy": args.policy}
    run = {"settings": settings, "max_kv_size": args.max_kv_size, "checkpoints": found}
    common.save(args.json, {"run": run})


if __name__ == "__main__":
    main()
