"""`mlx_h2o evaluate`: what bounded caches cost on your own model and texts, at equal bytes."""

import argparse
import contextlib
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

from .. import demo
from ..blas import say_slow_blas
from ..evaluation import report
from ..evaluation.arms import ARMS, DEFAULT, parsed
from ..evaluation.questions import Settings
from ..evaluation.run import SHARES, evaluate
from ..evaluation.tasks import TASKS
from ..lm.generate import load
from .flags import add_flags
from .parsing import OneLineParser, new_file
from .watch import Watch

_ARMS = [arm.name for arm in DEFAULT]
_HINTS = get_type_hints(Settings, include_extras=True).items()
_HELP = {name: kind.__metadata__[0] for name, kind in _HINTS if hasattr(kind, "__metadata__")}


def run(args: argparse.Namespace, *_: Any) -> int:
    """Measure, and print a table; returns the exit status."""
    given: dict[str, Any] = {} if args.texts else {"documents": 1}  # a short text
    given |= {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name in (*_HELP, "ruler")
    }
    settings = Settings(**given)
    if args.ruler is not None and "ruler" not in args.tasks:
        raise ValueError(f"--ruler is {args.ruler}, expected ruler in --tasks")
    drawn = [task for task in args.tasks if task in ("loss", "chunks")]
    if args.plot is not None:
        if not drawn or "full" not in args.arms or args.plot == args.output:
            wanted = "loss or chunks in --tasks, and full in --arms, and not the file of --output"
            raise ValueError(f"--plot needs {wanted}")
        report.plotting(args.plot)
    arms = [parsed(text) for text in args.arms]
    texts = [_text(name) for name in args.texts] or [("embedded text", demo.text())]
    model, tokenizer = load(args.model)
    say_slow_blas()
    try:
        with Watch() as watch:
            result = evaluate(
                model, tokenizer, texts, arms, model_name=Path(args.model).name, tasks=args.tasks,
                shares=args.bytes, settings=settings, file=args.output, watch=watch,
            )  # fmt: skip
    except KeyboardInterrupt:
        there = args.output is not None and args.output.exists()
        kept = f"; run the same command again to resume from {args.output}" if there else ""
        print(f"mlx_h2o evaluate: interrupted{kept}", file=sys.stderr)
        return 130
    print(report.table(result), end="\n\n")
    for note in report.notes(result):
        print(note)
    if args.plot is not None:
        report.plot(result, args.plot, drawn[0])
    return 0


def parser() -> OneLineParser:
    found = OneLineParser(
        "Compare caches at equal bytes on a model and texts: how well each "
        "predicts (loss, token by token; chunks, 512 at a time), which planted facts it recalls "
        "(facts, turns, ruler), and what it writes (writing).", "model texts bytes arms tasks",
    )  # fmt: skip
    add = found.add_argument
    add_flags(found, "model", model=...)
    add("--texts", nargs="+", default=[], metavar="FILE",
        help="text files, or - for standard input (default: a short embedded text)")  # fmt: skip
    add("--bytes", nargs="+", type=_share, default=SHARES, metavar="SHARE",
        help="shares of the full cache's bytes at the text's length (default: "
        f"{' '.join(map(str, SHARES))})")  # fmt: skip
    add("--arms", nargs="+", default=_ARMS, metavar="ARM",
        help=f"what to compare: {', '.join(ARMS)}; or 'NAME: SETTING=VALUE ...', such as "
        f"'mine: policy=window kv_bits=8' (default: {' '.join(_ARMS)})")  # fmt: skip
    add("--tasks", nargs="+", choices=TASKS, default=TASKS[:1], metavar="TASK",
        help=f"{', '.join(TASKS)} (default: loss)")  # fmt: skip
    add("--output", type=new_file, metavar="FILE",
        help="write all figures here as JSON, and resume from what is there")  # fmt: skip
    add("--plot", type=new_file, metavar="FILE",
        help="draw loss against bytes: .svg, .png or .html (needs mlx-h2o[evaluate])")  # fmt: skip
    add = found.add_argument_group("texts and facts").add_argument
    add("--ruler", metavar="FILE", help="RULER's samples, one JSON object a line")
    for name, said in _HELP.items():
        default = getattr(Settings, name)
        several = isinstance(default, tuple)
        shown = " ".join(map(str, default)) if several else default
        add(f"--{name}", type=int, nargs="+" if several else None, default=argparse.SUPPRESS,
            metavar="N", help=f"{said} (default: {shown})")  # fmt: skip
    return found


def _share(text: str) -> Fraction:
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if 0 < (share := Fraction(text)) <= 1:
            return share
    raise argparse.ArgumentTypeError(f"{text!r} is not a share, expected e.g. 1/8")


def _text(name: str) -> tuple[str, str]:
    try:
        if name == "-":
            return "standard input", sys.stdin.buffer.read().decode("utf-8")
        return Path(name).name, Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--texts {name}: {getattr(error, 'strerror', error)}") from error
