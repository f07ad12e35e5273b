"""`python -m mlx_h2o.demo`: one text, one number of bytes, some caches, one table."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console

import mlx_h2o
from mlx_h2o.commands.parsing import new_file
from mlx_h2o.demo import DEMO, text
from mlx_h2o.demo.arms import arms
from mlx_h2o.demo.measure import Settings, measure, speeds
from mlx_h2o.demo.report import QuietReporter, TerminalReporter, as_json, footnotes, table
from mlx_h2o.evaluation.facts import plant
from mlx_h2o.lm.files import write_text
from mlx_h2o.lm.sizing import parsed_bytes

LONGEST_STEP = 0.05
"""Seconds for eight tokens with which the demo takes less than two minutes."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mlx_h2o.demo",
        description="Read a text with facts planted early, generate on, and compare the full KV "
        "cache, unquantised and in 4 bits, with caches of a tenth of its bytes: RotatingKVCache, "
        "and H2OKVCache with the policies keydiff and h2o.",
    )
    for name, default, meaning in (
        ("--length", 900, "tokens of text, facts included"),
        ("--facts", 8, "facts to plant"),
        ("--generate", 64, "tokens to generate"),
        ("--chunk", 128, "tokens per prefill chunk"),
        ("--seed", 0, "draws the facts"),
    ):
        help_text = f"{meaning} (default {default})"
        parser.add_argument(name, type=int, default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--model",
        default=DEMO,
        help="a model's folder, unless it is too slow here (default: the one in the package)",
    )
    parser.add_argument(
        "--max-kv-bytes",
        metavar="SIZE",
        help="what the bounded caches may hold, such as 200KB (default a tenth of the full cache)",
    )
    parser.add_argument(
        "--json", type=new_file, metavar="FILE", help="write the figures, unrounded, to FILE"
    )
    parsed = parser.parse_args(arguments)
    for name in ("facts", "generate", "chunk"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name} must be at least 1")
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


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    console = Console()
    try:
        name, model, tokenizer = load(parsed.model)
        planted = plant(
            tokenizer, text(), length=parsed.length, facts=parsed.facts, seed=parsed.seed
        )
        given = parsed.max_kv_bytes
        compared = arms(model, parsed.length, None if given is None else parsed_bytes(given))
        bounded = [arm.rows for arm in compared if arm.evicts and arm.rows is not None]
        if not bounded:
            raise ValueError(f"--max-kv-bytes is {given}, which all of the text fits into")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = Settings(name, min(bounded), chunk=parsed.chunk, generate=parsed.generate)
    with TerminalReporter(console) if console.is_terminal else QuietReporter() as reporter:
        results = [measure(model, tokenizer, arm, planted, settings, reporter) for arm in compared]
        timed = speeds(model, tokenizer, compared, planted, settings, reporter)
    if parsed.json is not None:
        found = as_json(results, timed, planted, settings)
        write_text(parsed.json, json.dumps(found, indent=2) + "\n")
    console.print(table(results, timed, planted, settings))
    for note in footnotes(results):
        console.print(note, style="dim", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
