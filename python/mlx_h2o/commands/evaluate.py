"""`mlx_h2o evaluate`: what bounded caches cost on one's own model and text, at equal bytes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import demo, policies
from ..config import H2OConfig
from ..evaluation import output, tables
from ..evaluation.facts import WORDINGS
from ..evaluation.presets import PRESETS
from ..evaluation.run import Evaluation, evaluate
from ..evaluation.strategies import DEFAULT_ROWS, Strategy, parse
from ..evaluation.summary import summaries
from ..evaluation.tasks import READINGS, TASKS, Settings
from ..lm.generate import load
from ..lm.routing import context_length
from .options import OneLineParser, add_cache_flags, settings_of

EMBEDDED = "embedded text"

_WIDE = 150
"""Columns of a terminal that shows intervals too."""

_DEFAULT = Settings()
_SETTINGS: dict[str, dict[str, Any]] = {
    "documents": {"type": int, "help": "windows of the text, at most"},
    "length": {"type": int, "help": "tokens in a document"},
    "seeds": {"type": int, "help": "number of seeds, which draw facts and random choices"},
    "prompt": {"type": int, "help": "ppl: tokens read at once; the rest follow one by one"},
    "chunk": {"type": int, "help": "tokens per prefill chunk"},
    "batch": {"type": int, "help": "documents read at a time (default: what fits 0.5 GB)"},
    "lengths": {"type": int, "nargs": "+", "help": "several lengths, in place of --length"},
    "depths": {
        "type": float,
        "nargs": "+",
        "help": "needle: where in the text facts are, from 0 to 1",
    },
    "needles": {"type": int, "nargs": "+", "help": "needle: facts in a document"},
    "wordings": {"nargs": "+", "choices": tuple(WORDINGS), "help": "needle: how facts are worded"},
    "readings": {
        "nargs": "+",
        "choices": READINGS,
        "help": "needle: how documents are read, in chunks or token by token",
    },
}


def run(arguments: Sequence[str]) -> int:
    """Run it with the command line's arguments; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        if args.json is not None:
            args.json.open("a").close()  # said before the work, not after it
        strategies = _strategies(parser, args)
        settings = _settings(args)
        texts = [_text(name) for name in args.text]
        model, tokenizer = load(args.model)
        if args.preset:
            chosen = PRESETS[args.preset]
            tokens = _longest(args, model, tokenizer, texts)
            strategies = [parse(text) for text in chosen.texts(tokens)] + strategies
            settings = _settings(args, chosen.settings(tokens))
        with _progress() as watch:
            found = evaluate(
                model,
                tokenizer,
                texts,
                strategies,
                model_name=args.model,
                tasks=args.tasks or (PRESETS[args.preset].tasks if args.preset else TASKS[:1]),
                settings=settings,
                controls=not (args.no_controls or args.preset),
                record=not args.no_record,
                folder=args.output,
                watch=watch,
            )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        kept = f"; the same command goes on from {args.output}" if args.output else ""
        print(f"mlx_h2o evaluate: interrupted{kept}", file=sys.stderr)
        return 130
    _show(found, args, shlex.join(["mlx_h2o", "evaluate", *arguments]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="mlx_h2o evaluate",
        description="Read texts with several caches and compare how well each predicts them "
        "(ppl: perplexity, divergence from the full cache, same top token), which planted facts it "
        "recalls (needle), and how much sparse V skips (skips). Controls are added: the full "
        "cache, mlx_lm's quantised caches, and for each strategy a rotating window and a random "
        "choice of rows of the same bytes.",
    )
    parser.add_argument("--model", required=True, help="a directory, a name on the hub, or demo")
    parser.add_argument(
        "--text",
        nargs="+",
        default=[EMBEDDED],
        metavar="FILE",
        help="text files, or - for standard input (default: a text in this package)",
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        metavar="STRATEGY",
        help="what to compare, such as full rotating:256 kv4 keydiff:256:kv4 merge:bytes=16MB",
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="the strategies, tasks and lengths of a published table, scaled to the model and the "
        "text, without controls; other flags win, --length scales it, --strategies are added: "
        + "; ".join(f"{name}: {preset.mirrors}" for name, preset in PRESETS.items()),
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="default: ppl")
    parser.add_argument("--no-controls", action="store_true", help="compare the strategies alone")
    parser.add_argument(
        "--no-record",
        action="store_true",
        help="do not record the first document and which of its positions each cache holds",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write results.json, .csv, .md and quality.png here; resume what is here",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write unrounded figures to this file"
    )
    for name, how in _SETTINGS.items():
        default = getattr(_DEFAULT, name)
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        said = how["help"] + (f" (default: {shown})" if shown else "")
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, **{**how, "help": said})
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=policies.names(),
        metavar="POLICY",
        help="compare these policies, in place of --policy",
    )
    add_cache_flags(parser)
    return parser


def _settings(args: argparse.Namespace, preset: dict[str, Any] | None = None) -> Settings:
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name in _SETTINGS
    }
    return Settings(**((preset or {}) | given))


def _longest(
    args: argparse.Namespace, model: Any, tokenizer: Any, texts: Sequence[tuple[str, str]]
) -> int:
    """Tokens of the longest document that the model and the texts allow, or --length."""
    if "length" in vars(args):
        return int(args.length)
    read = min(len(tokenizer.encode(text)) for _, text in texts)
    return min(read, context_length(model) or read)


def _strategies(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Strategy]:
    """Those that were written, or what the flags of a cache ask for."""
    named = (*H2OConfig.setting_names(), "max_kv_bytes", "budgets", "layers")
    flags = [name for name in named if name in vars(args)]
    if args.policies:
        flags.append("policies")
    if args.preset:
        if flags:
            flag = flags[0].replace("_", "-")
            raise ValueError(f"--preset with --{flag}, expected the settings in --strategies")
        return [parse(text) for text in args.strategies or ()]
    if args.strategies:
        if flags:
            flag = flags[0].replace("_", "-")
            raise ValueError(f"--strategies with --{flag}, expected the settings in the strategies")
        return [parse(text) for text in args.strategies]
    settings = settings_of(parser, args)
    own = ("policies", "policy", "max_kv_size", "max_kv_bytes")
    parts = [f"{name}={getattr(args, name)}" for name in flags if name not in own]
    rows = str(getattr(args, "max_kv_size", DEFAULT_ROWS)).lower()
    if settings.sized is not None:
        rows = f"bytes={settings.sized['max_kv_bytes']}"
    found = ["full", *([] if rows == "none" else [f"rotating:{rows}"])]
    found += [":".join([name, rows, *parts]) for name in args.policies or [settings.config.policy]]
    return [parse(text) for text in found]


def _text(name: str) -> tuple[str, str]:
    if name == EMBEDDED:
        return name, demo.text()
    try:
        if name == "-":
            return "standard input", sys.stdin.buffer.read().decode("utf-8")
        return Path(name).name, Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--text {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {name}: {error}") from error


class _progress:  # noqa: N801
    """A bar on standard error, where that is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description:40}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )

    def __enter__(self) -> Any:
        self._bar.start()
        task = self._bar.add_task("", total=None)
        return lambda said, done, total: self._bar.update(
            task, description=said, completed=done, total=total
        )

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()


def _show(found: Evaluation, args: argparse.Namespace, command: str) -> None:
    """Print the table, and write what was asked for."""
    result = output.as_json(found, summaries(found), command)
    console = Console()
    rows = tables.table(result)
    if console.is_terminal:
        console.print(_grid(rows, console.width))
    else:
        print(tables.markdown(rows), end="\n\n")
    for note in tables.notes(result):
        console.print(note, style="dim", highlight=False, markup=False)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.output is not None:
        if importlib.util.find_spec("matplotlib") is None:
            print(
                "No picture: matplotlib is not installed (pip install 'mlx-h2o[evaluate]').",
                file=sys.stderr,
            )
        for file in output.write(args.output, found, command):
            console.print(
                f"wrote {file}", style="dim", highlight=False, markup=False, soft_wrap=True
            )


def _grid(rows: tables.Table, width: int) -> Table:
    """For a terminal of so many columns; a narrow one shows no intervals."""
    grid = Table()
    for number, head in enumerate(rows[0]):
        grid.add_column(head, justify="right" if number else "left", overflow="fold")
    for cells in rows[1:]:
        grid.add_row(*(cell if width >= _WIDE else cell.partition(" [")[0] for cell in cells))
    return grid
