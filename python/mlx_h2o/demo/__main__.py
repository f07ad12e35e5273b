"""`python -m mlx_h2o.demo`: compare some caches on one text at one number of bytes."""

import argparse
import json
import math
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

import mlx_h2o
from mlx_h2o.cli import ended
from mlx_h2o.commands.parsing import OneLineParser, nbytes, new_file, number
from mlx_h2o.commands.watch import Watch
from mlx_h2o.demo import DEMO, text
from mlx_h2o.evaluation import arms
from mlx_h2o.evaluation.environment import environment_line
from mlx_h2o.evaluation.questions import Settings, windows
from mlx_h2o.evaluation.report import markdown
from mlx_h2o.evaluation.run import evaluate
from mlx_h2o.evaluation.speed import timed
from mlx_h2o.lm.files import write_text

LONGEST_STEP = 0.05
"""The most seconds for eight tokens if the demo is to take less than two minutes."""
COMPARED = [
    *(arms.ARMS[name] for name in ("full", "kv4")),
    arms.Arm("window", settings=arms.alone(policy="window")),
    arms.Arm("keydiff 4 bits", settings={"policy": "keydiff", "kv_bits": 4}),
    arms.ARMS["ours"],
]
"""The full cache, unquantised and in 4 bits, and caches of a tenth of the bytes."""
TURNS, STEP, ENOUGH = 5, 8, 0.8


def fast_enough(name: str) -> tuple[str, Any, Any]:
    """A model's name, the model and its tokenizer; the package's own if the model is too slow."""
    model, tokenizer = mlx_h2o.load(name)
    makes, prompt = {"full": partial(make_prompt_cache, model)}, mx.zeros(STEP + 1, mx.int32)
    runs = partial(timed, model, makes, prompt, rounds=4, turns=0)
    if name == DEMO or (seconds := min(runs()["full"].prefill[1:])) <= LONGEST_STEP:
        return Path(name).name, model, tokenizer
    print(
        f"{Path(name).name} takes {seconds:.2f} s for 8 tokens here, expected at most "
        f"{LONGEST_STEP} s: this shows the model in the package",
        file=sys.stderr,
    )
    return fast_enough(DEMO)


def figures(name: str, model: Any, tokenizer: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Figures of each arm: an evaluation of one text, and the speed of continuing it.

    Raises ValueError if the text is too short, or the bytes are too few or too many.
    """
    settings = Settings(
        documents=1, length=given.length, step=STEP, lengths=(given.length,), facts=given.facts,
        wordings=("secret" if name == DEMO else "number",), seed=given.seed,
    )  # fmt: skip
    sizes = arms.Sizes(model, given.seed)
    whole = sizes.full(given.length)
    share = Fraction(given.max_kv_bytes or Fraction(whole, 10)) / whole
    if share >= 1:
        raise ValueError(f"--max-kv-bytes is {given.max_kv_bytes}, which the whole text fits into")
    made = {arm.name: sizes.made(arm, given.length, int(whole * share)) for arm in COMPARED}
    texts = [("the text", text())]
    with Watch(every=math.inf) as watch:
        result = evaluate(
            model, tokenizer, texts, COMPARED, model_name=name, tasks=("loss", "facts"),
            shares=(share,), settings=settings, watch=watch, sizes=sizes,
        )  # fmt: skip
        watch("writing", 0, 0)
    (tokens,) = windows(tokenizer, texts, count=1, length=given.length)
    count, makes = given.generate // TURNS, {name: one.make for name, one in made.items()}
    mx.random.seed(given.seed)
    sampler = make_sampler(0.7)  # decoded greedily, the small model repeats itself
    kinds = timed(model, makes, mx.array(tokens), turns=TURNS, tokens=count, sampler=sampler)
    by = {(one["arm"], one["task"]): one["figures"] for one in result["records"]}
    return {
        "environment": result["environment"],
        "settings": {"model": name, **result["settings"], "generate": given.generate},
        "arms": [
            {
                "name": arm,
                "kv_bytes": made[arm].nbytes,
                "perplexity": math.exp(by[arm, "loss"]["loss"][0]),
                "top1_agreement": by[arm, "loss"]["top1"][0],
                "facts_recalled": by[arm, "facts"]["whole"],
                "tokens_per_second": [count / seconds for seconds in kind.decode],
                "peak_prefill_bytes": kind.peaks["prefill"],
                "peak_decode_bytes": kind.peaks["decode"],
                "generated": tokenizer.decode(kind.tokens),
            }
            for arm, kind in kinds.items()
        ],
    }


def arms_table(found: dict[str, Any]) -> str:
    """One column per arm, one row per measure. The first arm is the full cache."""
    given, (full, *_) = found["settings"], found["arms"]
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "KV cache, KB": lambda one: f"{one['kv_bytes'] / 1e3:.0f}",
        "of the full cache's": lambda one: f"1/{full['kv_bytes'] / one['kv_bytes']:.0f}",
        "perplexity": lambda one: f"{one['perplexity']:.2f}",
        "same top token": lambda one: f"{one['top1_agreement']:.1%}",
        "facts recalled": lambda one: f"{sum(one['facts_recalled']):.0f} of {given['facts']}",
        "tokens/s": lambda one: f"{statistics.median(one['tokens_per_second']):.0f}",
        "peak reading, MB": lambda one: f"{one['peak_prefill_bytes'] / 1e6:.1f}",
        "peak writing, MB": lambda one: f"{one['peak_decode_bytes'] / 1e6:.1f}",
    }
    if sum(full["facts_recalled"]) < ENOUGH * given["facts"]:
        del rows["facts recalled"]  # the other caches are not to blame
    head = f"{given['length']} tokens, {given['model']}", *(one["name"] for one in found["arms"])
    return markdown(head, ([said, *map(cell, found["arms"])] for said, cell in rows.items()))


def note(found: dict[str, Any]) -> str:
    """What a reader of the table needs to know."""
    recalled, facts = sum(found["arms"][0]["facts_recalled"]), found["settings"]["facts"]
    machine = environment_line(found["environment"])
    said = (
        f"Speeds are medians of {TURNS}, the caches taking turns. The KV cache counts rows of "
        "16 bits; a CPU computes in 32. Peaks include the model's weights. Perplexity and "
        f"agreement are of a text read {STEP} tokens at a time. One text: a demonstration, not a "
        f"study. Of {facts} facts planted in it the full cache itself recalls {recalled:.0f}. "
        f"{machine}."
    )
    return textwrap.fill(said, 100, break_on_hyphens=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = OneLineParser(
        "Read a text with facts planted in it, ask for them, write on, and compare the full KV "
        "cache, unquantised and in 4 bits, with a window, keydiff and ours at a tenth of its bytes",
        prog="python -m mlx_h2o.demo",
    )
    add = parser.add_argument
    for name, least, default, meaning in (
        ("--length", 1, 900, "tokens of text, facts included"),
        ("--facts", 1, 8, "facts to plant"),
        ("--generate", TURNS, 64, "tokens to write"),
        ("--seed", 0, 0, "draws the facts"),
    ):
        add(name, type=number(least), default=default, metavar="N", help=meaning)
    add("--model", default=DEMO, help="a directory; demo stands in for one that is too slow")
    held = "what the bounded caches may hold, such as 200KB (default: a tenth of the full cache)"
    add("--max-kv-bytes", type=nbytes, metavar="SIZE", help=held)
    add("--json", type=new_file, metavar="FILE", help="write the figures, unrounded, to FILE")
    given = parser.parse_args(arguments)
    found = figures(*fast_enough(given.model), given)
    if given.json is not None:
        write_text(given.json, json.dumps(found, indent=2) + "\n")
    print(arms_table(found), end="\n\n")
    for one in found["arms"] if sys.stdout.isatty() else ():
        print(f"{one['name']}: {one['generated']}\n")
    print(note(found))
    return 0


if __name__ == "__main__":
    sys.exit(ended("python -m mlx_h2o.demo", main))
