"""`mlx_h2o benchmark`: tokens per second and memory, with random prompts."""

import argparse
import time
from typing import Any

import mlx.core as mx
from mlx_lm.generate import DEFAULT_MODEL

from ..lm.generate import batch_generate, stream_generate
from ..lm.generation_checks import vocabulary
from ..lm.ranks import Ranks
from .flags import cache_parser
from .options import CacheSettings, loaded, say_summary
from .parsing import OneLineParser
from .watch import Watch

_REPORTED = ("prompt_tps", "generation_tps", "peak_memory")


def parser() -> OneLineParser:
    names = "model trust-remote-code quantize-activations prefill-step-size prompt-tokens "
    names += "generation-tokens batch-size num-trials delay"
    return cache_parser(
        "Measure speed and memory with KV caches of a fixed size.",
        "model prompt-tokens generation-tokens max-kv-bytes max-kv-size", {"": names},
        model=DEFAULT_MODEL,
    )  # fmt: skip


def run(args: argparse.Namespace, settings: CacheSettings, ranks: Ranks) -> None:
    """Measure, and print the figures."""
    mx.random.seed(0)
    model, tokenizer = loaded(args)
    tokenizer.eos_token_ids = []  # so that no text ends early
    length, written, batch = args.prompt_tokens, args.generation_tokens, args.batch_size
    drawn: Any = mx.random.randint(0, vocabulary(model), (batch, length)).tolist()
    settings = settings.fitted(model, length=length + written)

    def measured(said: str) -> tuple[Any, list[Any]]:
        every = [settings.caches(model, length=length + written) for _ in drawn]
        given: Any = {"max_tokens": written, "prefill_step_size": args.prefill_step_size}
        if batch > 1:
            given |= {"prompt_caches": every, "return_prompt_caches": True}
            answers: Any = batch_generate(model, tokenizer, drawn, **given)
            return answers.stats, answers.caches[0]
        for last in stream_generate(model, tokenizer, drawn[0], prompt_cache=every[0], **given):
            watch(said, last.generation_tokens, written)
        return last, every[0]

    with Watch() as watch:
        print("Running warmup..", flush=True)
        measured("warmup")
        sizes = f"prompt_tokens={length}, generation_tokens={written}, batch_size={batch}"
        print(f"Timing with {sizes}.")
        found: list[dict[str, float]] = []
        for trial in range(1, args.num_trials + 1):
            time.sleep(args.delay)
            began = time.perf_counter()
            stats, caches = measured(f"trial {trial}")
            seconds = time.perf_counter() - began
            found.append({name: getattr(stats, name) for name in _REPORTED})
            print(f"Trial {trial}:  {_said(found[-1])}, total_time={seconds:.3f}", flush=True)
    averages = {name: sum(one[name] for one in found) / len(found) for name in _REPORTED}
    print(f"Averages: {_said(averages)}")
    say_summary(caches, model, f", for each of {batch} prompts" if batch > 1 else "")


def _said(figures: dict[str, float]) -> str:
    return ", ".join(f"{name}={figure:.3f}" for name, figure in figures.items())
