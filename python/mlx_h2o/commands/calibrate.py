"""`mlx_h2o calibrate`: what each layer of a model loses with few rows, as a file."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from .. import demo, policies
from ..lm.calibration import SHORTEST, calibrate
from ..lm.generate import load
from .options import OneLineParser, in_flags


def run(arguments: Sequence[str]) -> int:
    """Measure a model on a text and write the profile; the exit status."""
    args = _parser().parse_args(arguments)
    console = Console(stderr=True)
    bar = Progress(
        "calibrating", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )
    try:
        text = demo.text() if args.text is None else args.text.read_text(encoding="utf-8")
        if args.output.is_dir() or not args.output.absolute().parent.is_dir():
            raise ValueError(f"--output {args.output} is not a file in an existing directory")
        model, tokenizer = load(args.model)
        with bar, warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: console.print(message)
            task = bar.add_task("")
            calibrate(
                model, tokenizer, text, policy=args.policy, length=args.length,
                documents=args.documents, file=args.output,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )  # fmt: skip
    except (OSError, ValueError) as error:
        print(f"mlx_h2o calibrate: {in_flags(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mlx_h2o calibrate: the same command goes on from here", file=sys.stderr)
        return 130
    print(f"mlx_h2o generate --model {args.model} --profile {args.output} uses it.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="mlx_h2o calibrate",
        description="Measure what each layer of a model loses when it alone keeps few rows, so "
        "that --profile can give the rows to the layers that need them. This takes minutes for a "
        "small model. An interrupted run resumes with the same command.",
    )
    parser.add_argument("--model", required=True, help="a directory, a name on the hub, or demo")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="profile to write"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text to read (default: one in this package)"
    )
    parser.add_argument(
        "--policy",
        choices=policies.names(),
        default="merge",
        metavar="POLICY",
        help="policy to measure with (default: %(default)s)",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=640,
        metavar="N",
        help=f"tokens in a document, at least {SHORTEST} (default: %(default)s)",
    )
    parser.add_argument(
        "--documents",
        type=int,
        default=8,
        metavar="N",
        help="documents to read (default: %(default)s)",
    )
    return parser
