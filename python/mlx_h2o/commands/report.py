"""`mlx_h2o report`: what `mlx_h2o evaluate` measured, as a page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evaluation.page import page
from ..evaluation.run import MEASUREMENTS
from .options import OneLineParser

_RESULT = "results.json"
_PARTS = (
    "command", "model", "documents", "settings", "side_by_side", "environment", "notes",
    "failures", "strategies", "summary",
)  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Write the page; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    file = args.run / _RESULT if args.run.is_dir() else args.run
    output = args.output or file.with_name("report.html")
    try:
        output.write_text(page(_loaded(file)), encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"wrote {output}")
    return 0


def _loaded(file: Path) -> dict[str, Any]:
    """The result in a file. Raises ValueError where there is none, OSError if it cannot be read."""
    if not file.exists() and file.with_name(MEASUREMENTS).exists():
        raise ValueError(
            f"{file.parent} is unfinished: the command of mlx_h2o evaluate that began it goes on"
        )
    if not file.exists():
        raise ValueError(f"{file} does not exist, expected what mlx_h2o evaluate --output wrote")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    missing = [name for name in _PARTS if not isinstance(found, dict) or name not in found]
    if missing:
        raise ValueError(f"{file} is no result of mlx_h2o evaluate: it has no {missing[0]!r}")
    return dict(found)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="mlx_h2o report",
        description="Show what `mlx_h2o evaluate --output RUN` measured as one HTML page: quality "
        "against bytes, the tables, which positions were held, and what is left of a text.",
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="directory of a run, or its results.json"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="page to write (default: report.html in RUN)"
    )
    return parser
