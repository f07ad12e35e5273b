"""`python -m mlx_h2o.demo`: one text, one budget, four caches, one table."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import mlx_h2o
from mlx_h2o.demo import text
from mlx_h2o.demo.arms import arms
from mlx_h2o.demo.measure import Settings, measure, speeds
from mlx_h2o.demo.report import QuietReporter, TerminalReporter, as_json, footnotes, table
from mlx_h2o.evaluation.facts import plant


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mlx_h2o.demo",
        description="Read a text with facts planted early, generate on, and compare the full KV "
        "cache with three caches of a fixed budget: RotatingKVCache, and H2OKVCache with the "
        "policies h2o and keydiff.",
    )
    for name, default, meaning in (
        ("--max-kv-size", 256, "the budget, in rows"),
        ("--length", 900, "tokens of text, facts included"),
        ("--facts", 8, "facts to plant"),
        ("--generate", 64, "tokens to generate"),
        ("--chunk", 128, "tokens per prefill chunk"),
        ("--seed", 0, "draws the facts"),
    ):
        help_text = f"{meaning} (default {default})"
        parser.add_argument(name, type=int, default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures, unrounded, to FILE"
    )
    parsed = parser.parse_args(arguments)
    for name in ("facts", "generate", "chunk"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if not 8 <= parsed.max_kv_size < parsed.length:
        parser.error(
            "--max-kv-size must be at least 8 and below --length: otherwise nothing is evicted"
        )
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    console = Console()
    settings = Settings(
        max_kv_size=parsed.max_kv_size, chunk=parsed.chunk, generate=parsed.generate
    )
    model, tokenizer = mlx_h2o.load("demo")
    try:
        planted = plant(
            tokenizer, text(), length=parsed.length, facts=parsed.facts, seed=parsed.seed
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with TerminalReporter(console) if console.is_terminal else QuietReporter() as reporter:
        compared = arms(model, settings.max_kv_size)
        results = [measure(model, tokenizer, arm, planted, settings, reporter) for arm in compared]
        timed = speeds(model, tokenizer, compared, planted, settings, reporter)
    if parsed.json is not None:
        parsed.json.write_text(
            json.dumps(as_json(results, timed, planted, settings), indent=2) + "\n"
        )
    console.print(table(results, timed, planted, settings))
    for note in footnotes(results):
        console.print(note, style="dim", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
