r"""Speed of decoding at the full budget, against mlx_lm's RotatingKVCache and against ``keydiff``.

    python benchmarks/decode_step.py --models demo random-100m smollm2-135m-instruct \
        --json benchmarks/results/decode_step.json

SmolLM2 is a directory, which `nox -s yardsticks` makes. The arms take turns of a few tokens; all
but the full cache evict. A ratio compares two turns of a round: speeds against RotatingKVCache,
times against ``keydiff`` and against the same policy without the arm's other setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import get_total_parameters

import mlx_h2o
from lib import common
from mlx_h2o.evaluation.speed import Make, timed
from mlx_h2o.evaluation.statistics import ratios, spread

ROTATING, FULL, KEYDIFF = "rotating", "full", "keydiff"
ARMS: dict[str, dict[str, Any]] = {"h2o, fold=False": {"policy": "h2o", "fold": False}}
for _policy in (KEYDIFF, "h2o", "h2o-ema", "window"):
    ARMS |= {_policy: {"policy": _policy}, f"{_policy}, 8 bits": {"policy": _policy, "kv_bits": 8}}


def maker(name: str, model: Any, budget: int) -> Make:
    """A function that makes the caches of an arm."""
    if name == FULL:
        return lambda: [KVCache() for _ in model.layers]
    if name == ROTATING:
        return lambda: [RotatingKVCache(budget, keep=4) for _ in model.layers]
    return partial(mlx_h2o.make_prompt_cache, model, budget, **ARMS[name])


def prompt_of(model: Any, budget: int) -> mx.array:
    """A prompt of more tokens than the budget."""
    return (mx.arange(budget + 32) * 7919) % model.args.vocab_size


def measure(
    name: str, budget: int, tokens: int, repeats: int, wanted: Sequence[str]
) -> dict[str, Any]:
    model = common.loaded(name)
    makes = {arm: maker(arm, model, budget) for arm in dict.fromkeys((ROTATING, *wanted))}
    prompt = prompt_of(model, budget)
    arms = timed(model, makes, prompt, turns=repeats + 1, tokens=tokens)
    turns = {arm: one.decode[1:] for arm, one in arms.items()}  # the first warms up
    results: dict[str, Any] = {}
    for arm, seconds in turns.items():
        results[arm] = {
            "milliseconds_per_token": spread([1e3 * one / tokens for one in seconds]),
            "ratio_to_rotating": ratios(turns[ROTATING], seconds),
        }
        of = {KEYDIFF, arm.partition(",")[0]} & turns.keys() - {arm}
        results[arm]["time_of"] = {other: ratios(seconds, turns[other]) for other in sorted(of)}
        common.show(f"{name}, {arm}", results[arm])
    return {
        "model": Path(name).name, "parameters": get_total_parameters(model), "max_kv_size": budget,
        "tokens_per_turn": tokens, "repeats": repeats, "arms": results,
    }  # fmt: skip


def main() -> None:
    args = common.arguments(
        __doc__, models=(*common.MODELS,), arms=(FULL, ROTATING, *ARMS),
        max_kv_size=256, tokens=5, repeats=40,
    )  # fmt: skip
    runs = []
    for name in args.models:
        runs.append(measure(name, args.max_kv_size, args.tokens, args.repeats, args.arms))
        common.save(args.json, {"runs": runs})  # the results so far


if __name__ == "__main__":
    main()
