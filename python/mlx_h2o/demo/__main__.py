"""`python -m mlx_h2o.demo`: one text, one number of bytes, some caches, one table."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.table import Table

import mlx_h2o
from mlx_h2o.commands.parsing import new_file
from mlx_h2o.commands.watch import Watch
from mlx_h2o.demo import DEMO, text
from mlx_h2o.evaluation import arms
from mlx_h2o.evaluation.environment import environment_line
from mlx_h2o.evaluation.questions import windows
from mlx_h2o.evaluation.run import evaluate
from mlx_h2o.evaluation.settings import Settings
from mlx_h2o.evaluation.speed import timed
from mlx_h2o.lm.files import write_text
from mlx_h2o.lm.sizing import parsed_bytes

LONGEST_STEP = 0.05
"""Seconds for eight tokens with which the demo takes less than two minutes."""
ARMS = [
    *(arms.ARMS[name] for name in ("full", "kv4", "window")),
    arms.Arm("keydiff 4 bits", settings={"policy": "keydiff", "kv_bits": 4}),
    arms.ARMS["ours"],
]
"""The whole text in full and in 4 bits, and caches of a tenth of the bytes."""
TURNS, STEP, ENOUGH = 5, 8, 0.8


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mlx_h2o.demo",
        description="Read a text with facts planted in it, ask for them, write on, and compare the "
        "full KV cache, unquantised and in 4 bits, with caches of a tenth of its bytes: mlx_lm's "
        "window, keydiff in 4 bits, and what --max-kv-bytes makes of them.",
    )
    add = parser.add_argument
    for name, default, meaning in (
        ("--length", 900, "tokens of text, facts included"),
        ("--facts", 8, "facts to plant"),
        ("--generate", 64, "tokens to write"),
        ("--seed", 0, "draws the facts"),
    ):
        add(name, type=int, default=default, metavar="N", help=f"{meaning} (default {default})")
    add("--model", default=DEMO, help="a model's folder, unless it is too slow here (default: the "
        "one in the package)")  # fmt: skip
    add("--max-kv-bytes", metavar="SIZE", help="what the bounded caches may hold, such as 200KB "
        "(default a tenth of the full cache)")  # fmt: skip
    add("--json", type=new_file, metavar="FILE", help="write the figures, unrounded, to FILE")
    parsed = parser.parse_args(arguments)
    if parsed.generate < TURNS:
        parser.error(f"--generate must be at least {TURNS}")
    return parsed


def load(name: str) -> tuple[str, Any, Any]:
    """A model's name, the model and its tokenizer: those of the package where it is too slow."""
    model, tokenizer = mlx_h2o.load(name)
    if name != DEMO and (seconds := step_seconds(model)) > LONGEST_STEP:
        print(
            f"{Path(name).name} takes {seconds:.2f} s for 8 tokens here, expected at most "
            f"{LONGEST_STEP} s: this shows the model in the package",
            file=sys.stderr,
        )
        return DEMO, *mlx_h2o.load(DEMO)
    return Path(name).name, model, tokenizer


def step_seconds(model: Any) -> float:
    """What eight tokens take, the best of three times."""
    cache, seconds = make_prompt_cache(model), []
    for _ in range(4):  # the first one loads the weights
        start = time.perf_counter()
        mx.eval(model(mx.zeros((1, 8), mx.int32), cache=cache))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def measure(name: str, model: Any, tokenizer: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Figures of each arm: an evaluation of one text, and the speed of writing on from it.

    Raises ValueError where the text is too short, or the bytes are too few or too many.
    """
    settings = Settings(
        documents=1, length=given.length, step=STEP, lengths=(given.length,), facts=given.facts,
        wordings=("secret" if name == DEMO else "number",), seed=given.seed,
    )  # fmt: skip
    sizes = arms.Sizes(model, given.seed)
    whole = sizes.full(given.length)
    share = Fraction(1, 10)
    if given.max_kv_bytes is not None:
        share = Fraction(parsed_bytes(given.max_kv_bytes), whole)
    if share >= 1:
        raise ValueError(f"--max-kv-bytes is {given.max_kv_bytes}, which the whole text fits into")
    made = {arm.name: sizes.made(arm, given.length, int(whole * share)) for arm in ARMS}
    texts = [("the text", text())]
    with Watch(every=math.inf) as watch:
        result = evaluate(
            model, tokenizer, texts, ARMS, model_name=name, tasks=("loss", "facts"),
            shares=(share,), settings=settings, watch=watch,
        )  # fmt: skip
        watch("writing", 0, 0)
    (tokens,) = windows(tokenizer, texts, count=1, length=given.length)
    makes = {name: one.make for name, one in made.items()}
    count = given.generate // TURNS
    kinds = timed(model, makes, mx.array(tokens), turns=TURNS, tokens=count, samplers=sampler)
    by = {(one["arm"], one["task"]): one for one in result["records"]}
    return {
        "environment": result["environment"],
        "settings": {"model": name, **result["settings"], "generate": given.generate},
        "arms": [
            {
                "name": arm,
                "kv_bytes": made[arm].nbytes,
                "perplexity": math.exp(by[arm, "loss"]["figures"]["loss"][0]),
                "top1_agreement": by[arm, "loss"]["figures"]["top1"][0],
                "facts_recalled": by[arm, "facts"]["figures"]["whole"],
                "tokens_per_second": [count / seconds for seconds in kind.decode],
                "peak_prefill_bytes": kind.peaks["prefill"],
                "peak_decode_bytes": kind.peaks["decode"],
                "generated": tokenizer.decode(kind.tokens),
            }
            for arm, kind in kinds.items()
        ],
    }


def sampler() -> Callable[[mx.array], mx.array]:
    """At a temperature of 0.7, the same draws for every arm: the small model, decoded greedily,
    repeats itself."""
    key = [mx.random.key(0)]

    def draw(log_weights: mx.array) -> mx.array:
        key[0], own = mx.random.split(key[0])
        return mx.random.categorical(log_weights / 0.7, key=own)

    return draw


def table(found: dict[str, Any]) -> Table:
    """One column per arm, one row per measure. The first arm is the full cache."""
    given, each = found["settings"], found["arms"]
    full = each[0]
    grid = Table(title=f"{given['length']} tokens, {given['model']}", title_justify="left")
    grid.add_column("")
    for one in each:
        grid.add_column(one["name"], justify="right")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "KV cache, KB": lambda one: f"{one['kv_bytes'] / 1e3:.0f}",
        "of the full cache's": lambda one: f"1/{full['kv_bytes'] / one['kv_bytes']:.0f}",
        "perplexity": lambda one: f"{one['perplexity']:.2f}",
        "same top token": lambda one: f"{one['top1_agreement']:.1%}",
        "facts recalled": lambda one: f"{sum(one['facts_recalled']):.0f} of {given['facts']}",
        "tokens/s": lambda one: f"{np.median(one['tokens_per_second']):.0f}",
        "peak reading, MB": lambda one: f"{one['peak_prefill_bytes'] / 1e6:.1f}",
        "peak writing, MB": lambda one: f"{one['peak_decode_bytes'] / 1e6:.1f}",
    }
    if sum(full["facts_recalled"]) < ENOUGH * given["facts"]:
        del rows["facts recalled"]  # the other caches are not to blame
    for label, cell in rows.items():
        grid.add_row(label, *map(cell, each))
    return grid


def notes(found: dict[str, Any]) -> list[str]:
    """What a reader needs to know beside the table."""
    full, facts = found["arms"][0], found["settings"]["facts"]
    recalled = f"{sum(full['facts_recalled']):.0f} of {facts}"
    return [
        f"Speeds are medians of {TURNS}, the caches taking turns. The KV cache counts rows of "
        "16 bits; a CPU computes in 32. Peaks include the model's weights. Perplexity and "
        f"agreement are of a text read {STEP} tokens at a time. One text: a demonstration, not a "
        f"study. Of {facts} facts planted in it the full cache itself recalls {recalled}.",
        environment_line(),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    console = Console()
    try:
        found = measure(*load(given.model), given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json is not None:
        write_text(given.json, json.dumps(found, indent=2) + "\n")
    console.print(table(found))
    for one in found["arms"] if console.is_terminal else ():
        console.print(f"[bold]{one['name']}[/bold]:", one["generated"], highlight=False)
    for note in notes(found):
        console.print(note, style="dim", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
