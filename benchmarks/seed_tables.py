"""The tables of the papers and articles behind this package, repeated on a real model.

    python benchmarks/seed_tables.py smollm2-135m-instruct --texts BOOK.txt ... [--tables 3 4 ...]

AtomGradient 2026, tables 3, 4, 7, 8 and 9: perplexity of a window and of `h2o-ema` by preset, rows
and length. Zhang et al. 2023 (H2O), appendix C.6: heavy rows, recent rows, or both, in a budget of
a fifth of the text. Turney 2026, sec. 4.8: thresholds of sparse V on rows of 8 and 4 bits. Next to
our figures are those of the sources, on larger models: changes of the perplexity in percent of the
full cache's, or for sparse V of that without a threshold. Each table has a file of results, from
which a later run continues.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import mlx_h2o
from mlx_h2o.commands.watch import Watch
from mlx_h2o.evaluation.arms import ARMS, Arm, alone
from mlx_h2o.evaluation.questions import Settings
from mlx_h2o.evaluation.run import evaluate

RESULTS = Path(__file__).parent / "results"
MODELS = Path(os.environ.get("MLX_H2O_MODELS", Path.home() / ".cache" / "mlx-h2o" / "models"))


class Row(NamedTuple):
    """An arm, and the change of perplexity in percent that its source states, if any."""

    arm: Arm
    said: float | None


class Table(NamedTuple):
    """Arms, and the number and length of the texts; the first arm is the baseline."""

    source: str
    length: int
    documents: int
    rows: tuple[Row, ...]


def _window(rows: int, said: float | None) -> Row:
    return Row(Arm(f"window, {rows} rows", "window", {"max_kv_size": rows}), said)


def _h2o(rows: int, said: float | None, heavy: int | None = None) -> Row:
    of = {} if heavy is None else {"heavy_size": heavy}
    settings = alone(policy="h2o-ema", max_kv_size=rows, **of)
    name = f"h2o-ema, {rows} rows" + ("" if heavy is None else f", {heavy} heavy")
    return Row(Arm(name, settings=settings), said)


def _sum(name: str, length: int, heavy: float, recent: float) -> Row:
    """A budget of a fifth of the text, divided into heavy and recent rows."""
    rows = length // 5
    sizes = {"heavy_size": int(heavy * rows), "recent_size": max(1, int(recent * rows))}
    settings = alone(policy="h2o-sum", sink_size=0, max_kv_size=sum(sizes.values()), **sizes)
    return Row(Arm(name, settings=settings), None)


def _sparse(bits: int, tau: float) -> Row:
    settings = {"max_kv_size": None, "kv_bits": bits, "dense_size": 0, "sparse_v": tau}
    return Row(Arm(f"{bits} bits, {tau:g}", settings=settings), 0.0 if tau else None)


FULL = Row(ARMS["full"], None)
_BY_LENGTH = {512: (1.8, 0.1), 1024: (9.9, 7.0), 2048: (19.0, 13.3), 4096: (24.9, 19.7)}
_BY_ROWS = ((128, 30.3, 26.5), (256, 19.0, 13.3), (512, 6.0, 5.9), (1024, 1.8, 1.3))
_THRESHOLDS = (0.0, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
_PRESETS = (FULL, _window(256, 2.7), _h2o(256, 1.4, 64), _h2o(256, 0.9, 128))
_SPLITS = (FULL, _window(256, 2.4), *(_h2o(256, said, n) for n, said in (
    (32, 1.2), (64, 1.1), (128, 0.4)
)))  # fmt: skip
_LONG = (FULL, _window(256, 28.4), _h2o(256, 24.6), _window(512, 12.1), _h2o(512, 13.0))

TABLES = {
    "3": Table("AtomGradient 2026, table 3", 512, 10, _PRESETS),
    "4": Table("AtomGradient 2026, table 4", 512, 20, _SPLITS),
    "7": Table("AtomGradient 2026, table 7", 2048, 5, (
        FULL, *(row for n, a, b in _BY_ROWS for row in (_window(n, a), _h2o(n, b)))
    )),
    **{
        f"8-{length}": Table("AtomGradient 2026, table 8", length, 5 if length < 4096 else 3, (
            FULL, _window(256, a), _h2o(256, b)
        ))
        for length, (a, b) in _BY_LENGTH.items()
    },
    "9": Table("AtomGradient 2026, tables 8 and 9", 8192, 2, _LONG),
    "h2o": Table("Zhang et al. 2023, appendix C.6", 1024, 8, (
        FULL, _sum("recent rows alone", 1024, 0, 1), _sum("heavy rows alone", 1024, 1, 0),
        _sum("half heavy, half recent", 1024, 0.5, 0.5),
    )),
    "sparse-v": Table("Turney 2026, sec. 4.8", 512, 8, tuple(
        _sparse(bits, tau) for bits in (8, 4) for tau in _THRESHOLDS
    )),
}  # fmt: skip


def rows_of(name: str, result: dict[str, Any]) -> list[list[str]]:
    """Cells of a table: tokens, cache, perplexity, its change in percent, and the source's."""
    table, found = TABLES[name], []
    losses = {
        one["arm"]: sum(one["figures"]["loss"]) / len(one["figures"]["loss"])
        for one in result["records"]
        if "figures" in one
    }
    base = table.rows[0].arm.name
    for arm, said in table.rows:
        if said is None and arm.name.endswith(", 0"):
            base = arm.name
        if arm.name not in losses or base not in losses:
            continue
        change = 100 * math.expm1(losses[arm.name] - losses[base])
        own = "-" if arm.name == base else f"{change:+.1f} %"
        theirs = "-" if said is None else f"{said:+.1f} %"
        cells = [table.source, f"{table.length:,}", arm.name, f"{math.exp(losses[arm.name]):.2f}"]
        found.append([*cells, own, theirs])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help=f"a folder of {MODELS}")
    parser.add_argument("--texts", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    args = parser.parse_args()
    model, tokenizer = mlx_h2o.load(str(MODELS / args.model))
    texts = [(file.name, file.read_text(encoding="utf-8")) for file in args.texts]
    for name in args.tables:
        table = TABLES[name]
        evaluate(
            model,
            tokenizer,
            texts,
            [row.arm for row in table.rows],
            model_name=args.model,
            settings=Settings(documents=table.documents, length=table.length),
            file=RESULTS / f"seed_{name}.json",
            watch=Watch(),
        )


if __name__ == "__main__":
    main()
