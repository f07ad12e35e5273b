"""Prompts with a common prefix: what it saves to process it once and hold its rows once.

    python benchmarks/prefix_sharing.py --json benchmarks/results/prefix_sharing.json

Each run is its own process, in which `batch_generate` answers all prompts in one batch, with or
without a shared prefix; runs take turns in changing order. A ratio compares the two runs of a
round: above 1 is faster. Pss is that of the whole process at the last token, also as the increase
since the model was loaded. One process answers every prompt alone. Random weights, float32.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import get_total_parameters

import mlx_h2o
from lib import common
from mlx_h2o.evaluation.statistics import in_turns, ratios, spread

ARMS = ("shared", "unshared")
VOCABULARY = 1024
SHAPE = {
    "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCABULARY,
}  # fmt: skip


def small_model() -> Any:
    """Few layers, because MLX's matrix products on a CPU are slow; heads as in larger models."""
    model = common.random_model(**SHAPE)
    # Large weights, so that attention is not flat and answers do not repeat one token.
    model.apply(lambda weight: 3 * weight if weight.ndim == 2 else weight)
    mx.eval(model.parameters())
    return model


class Watched(BatchGenerator):
    """Remembers the batch that is running."""

    latest: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Watched.latest = self


def pss() -> int:
    """Bytes of this process in memory, with its share of shared pages."""
    return common.memory("Pss", "self/smaps_rollup")


def prompts_of(args: Any) -> list[list[int]]:
    """Prompts with a common prefix and ends of different lengths."""
    key = mx.random.key(1)
    prefix = mx.random.randint(1, VOCABULARY, (args.prefix,), key=key).tolist()
    ends = mx.random.randint(1, VOCABULARY, (args.sequences, 64), key=mx.random.key(2)).tolist()
    return [prefix + end[: 24 + place % 17] for place, end in enumerate(ends)]


def run(args: Any, arm: str) -> dict[str, Any]:
    """The results of one process."""
    model, prompts, tokenizer = small_model(), prompts_of(args), mlx_h2o.load("demo")[1]
    tokenizer.eos_token_ids = set()  # all answers have the same length
    settings = {"max_kv_size": args.prefix + args.own_rows, "prefix_size": args.prefix}
    step = {"prefill_step_size": args.step}
    if arm == "alone":
        given = {"max_tokens": args.tokens, "policy": args.policy, **settings, **step}
        each = (mlx_h2o.stream_generate(model, tokenizer, prompt, **given) for prompt in prompts)
        return {"answers": [[piece.token for piece in answer] for answer in each]}
    found: dict[str, Any] = {}
    times: list[float] = []

    def greedy(logprobs: mx.array) -> mx.array:
        tokens = mx.argmax(logprobs, axis=-1)
        mx.eval(tokens)
        times.append(time.perf_counter())
        if len(times) == args.tokens:
            mx.clear_cache()
            caches = Watched.latest._generation_batch.prompt_cache
            found["cache_bytes"] = sum(cache.nbytes for cache in caches)
            found["most_rows"] = max(cache.size() for cache in caches)
            found["pss"] = pss()
        return tokens

    def answer(prompts: list[list[int]], tokens: int, **given: Any) -> Any:
        return mlx_h2o.batch_generate(
            model, tokenizer, prompts, max_tokens=tokens, policy=args.policy,
            prefill_batch_size=args.sequences, return_token_ids=True, **step, **given,
        )  # fmt: skip

    sys.modules["mlx_lm.generate"].BatchGenerator = Watched  # type: ignore[attr-defined]
    answer([prompt[-8:] for prompt in prompts], 2, max_kv_size=64)  # warms up
    mx.clear_cache()
    mx.reset_peak_memory()
    before, held = pss(), mx.get_active_memory()
    begun = time.perf_counter()
    shared = arm == "shared"
    answers = answer(prompts, args.tokens, share_prefix=shared, sampler=greedy, **settings)
    gaps = [1e3 * (one - other) for one, other in zip(times[1:], times, strict=False)]
    return found | {
        "pss_since_the_model": found["pss"] - before,
        "peak_of_mlx": mx.get_peak_memory() - held,
        "seconds_to_first_tokens": times[0] - begun,
        "milliseconds_per_step": statistics.median(gaps[: args.tokens - 1]),
        "answers": answers.token_ids,
    }


def main() -> None:
    args = common.arguments(
        __doc__, sequences=16, prefix=1024, own_rows=48, tokens=32, step=256, policy="keydiff",
        repeats=5,
    )  # fmt: skip
    process = partial(common.in_a_process, run, args)
    runs = in_turns({arm: partial(process, arm) for arm in ARMS}, args.repeats)
    alone = process("alone")["answers"]
    arms: dict[str, Any] = {}
    for arm, each in runs.items():
        answers = [zip(one.pop("answers"), alone, strict=True) for one in each]
        same = [sum(found == expected for found, expected in pairs) for pairs in answers]
        arms[arm] = {name: spread([one[name] for one in each]) for name in each[0]}
        arms[arm]["answers_as_alone"] = min(same)
        common.show(arm, arms[arm])
    both = {
        f"ratio_of_{name}": ratios(*([one[name] for one in runs[arm]] for arm in reversed(ARMS)))
        for name in ("seconds_to_first_tokens", "milliseconds_per_step")
    }
    common.show("unshared to shared", both)
    given = {
        "model": SHAPE | {"parameters": get_total_parameters(small_model())},
        "sequences": args.sequences, "prefix_tokens": args.prefix,
        "max_kv_size": args.prefix + args.own_rows, "policy": args.policy, "tokens": args.tokens,
        "prefill_step_size": args.step, "repeats": args.repeats,
    }  # fmt: skip
    common.save(args.json, {**given, "arms": arms, **both})


if __name__ == "__main__":
    main()
