"""``python -m parity``: the same cases through every implementation; names the cases that fail."""

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from mlx_h2o import backends
from parity.runner import NAMES, all_cases, run
from paths import ROOT


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="parity", description=__doc__)
    parser.add_argument(
        "--legs", default=",".join(NAMES), help="comma-separated, in the order of the columns"
    )
    parser.add_argument("--cases", default="*", metavar="PATTERN", help="name, part of it, or glob")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument(
        "--build-dir", type=Path, default=ROOT / "build", metavar="DIR",
        help="where the C library is looked for, and case files are written (default: build)",
    )  # fmt: skip
    parser.add_argument(
        "--emulate", type=int, default=1, metavar="N",
        help="the emulator, which compiles its kernels, serves every N-th case (default: all)",
    )  # fmt: skip
    parser.add_argument("--long", action="store_true", help="traces of 1,000 steps too")
    parser.add_argument("--seed", type=int, default=0, help="of the cases that are drawn afresh")
    options = parser.parse_args(given)
    options.legs = [name for name in options.legs.split(",") if name]
    for name in options.legs:
        if name not in NAMES and name not in backends():
            parser.error(f"unknown leg {name!r}, expected some of {', '.join(NAMES)}")
    return options


def main(given: list[str] | None = None) -> int:
    """0 if every leg that ran agrees; with CI=true every leg must have run."""
    options = arguments(given)
    console = Console(width=None if sys.stdout.isatty() else 200)
    cases = all_cases(options.seed, options.cases, long=options.long)
    if not cases:
        console.print(f"no case is named {options.cases!r}", style="bold red", highlight=False)
        return 2
    report = run(
        cases, options.legs, options.build_dir, emulate=options.emulate,
        say=lambda text: console.print(text, style="dim"),
    )  # fmt: skip
    report.print(console)
    if options.json is not None:
        report.write(options.json)
    failures = report.failures()
    if os.environ.get("CI") == "true":
        failures += [f"{leg}: not run: {reason}" for leg, reason in report.not_run.items()]
    ran, total = len(report.verdicts), len(cases)
    if failures:
        console.print(f"{len(failures)} failed: {total} cases, {ran} legs", style="bold red")
        for line in failures:
            print(line, file=sys.stderr)
        return 1
    absent = sum(map(len, report.absent.values()))
    but = f"; {absent} cells n/a" if absent else ""
    console.print(f"{total} cases agree on {ran} legs{but}", style="bold green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
