"""Check and time the package on this machine: `python -m mlx_h2o.hardware`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import backends, load
from ..cli import ended
from ..commands.parsing import OneLineParser, new_file, number
from ..evaluation.environment import environment, environment_line
from ..lm.files import write_text
from ..lm.plan import random_model
from . import parity, tables, timings
from .timings import say

MODEL, LENGTHS = "SmolLM3-3B-4bit", (2048, 8192, 32768)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, and write the figures; returns 1 if an operation is off."""
    said = "Check every operation against plain MLX operations; time a model with mlx_lm's caches "
    said += "and ours; about fifteen minutes on a Mac."
    parser = OneLineParser(said, prog="python -m mlx_h2o.hardware")
    add = parser.add_argument
    add("--model", default=MODEL, help="a directory or demo; or a name of docs/models.md, and "
        "-4bit: its shape, random weights")  # fmt: skip
    add("--lengths", type=number(64), nargs="+", default=LENGTHS, metavar="N",
        help="tokens of prompts (default: 2048 8192 32768)")  # fmt: skip
    add("--repeats", type=number(1), default=5, metavar="N", help="repeats of each ratio")
    add("--tokens", type=number(1), default=16, metavar="N", help="tokens written in a turn")
    add("--output", type=new_file, default="hardware.json", metavar="FILE",
        help="figures; their table is beside it, as .md")  # fmt: skip
    args = parser.parse_args(arguments)
    if args.output.suffix == ".md":
        parser.error(f"--output is {args.output}, expected another ending: the table has .md")
    drawn = random_model(args.model)
    model: Any = drawn or load(args.model)[0]
    machine = environment()
    here = f"mlx-h2o {machine['mlx_h2o']} on {environment_line(machine)}."
    say(here)
    checked = parity.compare(next(name for name, one in backends().items() if one.default))
    say("\n".join([*checked["failed"], f"{len(checked['failed'])} cases failed"]))
    longest = max(args.lengths)
    result = {
        "model": args.model if drawn else Path(args.model).name,
        "random": drawn is not None,
        "environment": machine,
        "repeats": args.repeats,
        "parity": checked,
        "speed": timings.measure(model, args.lengths, args.repeats, args.tokens),
        "sparse_v": timings.sparse_v(longest, args.repeats),
        "growth": timings.growth(min(longest, 4096), args.repeats),
    }
    table = f"{tables.hardware_table(result)}\n\n{here}\n"
    print(table)
    write_text(args.output, json.dumps(result, indent=1) + "\n")
    write_text(args.output.with_suffix(".md"), table)
    return 1 if checked["failed"] else 0


if __name__ == "__main__":
    sys.exit(ended("python -m mlx_h2o.hardware", main))
