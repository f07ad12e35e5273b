"""A result of :func:`.run.evaluate` as a table in Markdown, and as a plot of loss against bytes."""

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..lm.prompt_cache import beyond_context
from .statistics import Difference, paired

Result = dict[str, Any]
Record = Mapping[str, Any]

_COLUMNS = {
    "loss": {"loss": "loss", "apart": "to {}", "kl": "KL", "top1": "top 1"},
    "chunks": {"loss": "loss, in chunks"},
    "facts": {"tokens": "facts"},
    "turns": {"tokens": "two turns"},
    "ruler": {"tokens": "RULER"},
    "writing": {"distinct": "distinct", "loss": "loss of what is written"},
}
"""By task: its measures, and their columns; "apart" is the loss minus another arm's."""


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]], texts: int = 1) -> str:
    """A table that terminals can show too; the first columns are texts, the others numbers."""
    cells = [[str(one).replace("|", "\\|") for one in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * n if at < texts else "-" * (n - 1) + ":" for at, n in enumerate(widths)]
    cells.insert(1, rule)
    sides = [str.ljust] * texts + [str.rjust] * (len(head) - texts)
    padded = (map(lambda pad, text, n: pad(text, n), sides, row, widths) for row in cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def spread_text(of: Mapping[str, float]) -> str:
    """Minimum, median and maximum."""
    return " / ".join(f"{of[name]:.2f}" for name in ("min", "median", "max"))


def table(result: Result, **chosen: Any) -> str:
    """The result of :func:`rows` as Markdown."""
    return markdown(*rows(result, **chosen), texts=2)


def rows(
    result: Result,
    arms: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    against: str = "ours",
) -> tuple[list[str], list[list[str]]]:
    """A head, and a line for each arm and share of the bytes; for all arms and tasks, or for some.

    Arms with their own size come first, then the largest share; arms are in the order in which they
    were measured. Losses are in nats above the full cache's, if that was measured, with the paired
    95 % interval of the difference. The column "to ours" has the interval of the loss minus that of
    the arm `against` at the same share. Facts are the share of answer tokens that are right, with
    the interval of the difference from the full cache's.
    """
    every = _records(result)
    by = {
        (share, arm, case): record
        for (share, arm, case), record in every.items()
        if (arms is None or arm in arms) and (tasks is None or case[0] in tasks)
    }
    order = list(dict.fromkeys(arm for _, arm, _ in every))
    lines = sorted(
        {key[:2] for key in by},
        key=lambda line: (-Fraction(line[0]) if line[0] else -math.inf, order.index(line[1])),
    )
    cases = list(dict.fromkeys(case for _, _, case in by))
    said = [task for task, _ in cases]
    head = ["of the bytes", "cache"]
    for task, tokens in cases:
        names = [name.format(against) for name in _COLUMNS[task].values()]
        head += [f"{name}, {tokens:,}" if said.count(task) > 1 else name for name in names]
    found = []
    for share, arm in lines:
        cells = [share or _held(every, arm), arm]
        for case in cases:
            compared = ((share, arm), (None, "full"), (share, against))
            records = [by.get((*line, case), {}) for line in compared]
            cells += [_cell(case[0], measure, *records) for measure in _COLUMNS[case[0]]]
        found.append(cells)
    return head, found


def _cell(task: str, measure: str, record: Record, full: Record, other: Record) -> str:
    """The cell for a record, given the full cache's record and that of the arm to compare with."""
    if measure == "apart":
        return _interval(differences(record, other, "loss"))
    if "figures" not in record:
        return "-"
    values: Sequence[float] = record["figures"][measure]
    mean = f"{sum(values) / len(values):.{4 if measure == 'kl' else 2}f}"
    compared = measure == "tokens" or (measure == "loss" and task != "writing")
    apart = differences(record, full, measure) if compared else None
    if apart is not None and measure == "loss":
        mean = f"{apart.mean:+.3f}"
    return f"{mean} {_interval(apart)}".removesuffix(" -")


def notes(result: Result) -> list[str]:
    """What a reader of the table must know."""
    settings = result["settings"]
    count = settings["documents"]
    found = [
        f"{count} text{'s' if count > 1 else ''} a task. Bytes are those of all layers whose "
        "caches grow, at the text's length, with 16 bits an unquantised element, and scales, "
        "scores and positions; shares are of the full cache's. Intervals of 95 % are bootstrapped "
        "from pairs, by text or by question: of few they are too narrow, of one there is none.",
    ]
    if (step := settings.get("step", 1)) > 1:
        found.append(f"Losses are of texts read {step} at a time; a window then hides first rows.")
    if beyond := beyond_context(result["context"], max(one["tokens"] for one in result["records"])):
        found.append(beyond)
    refused: dict[str, dict[str, None]] = {}
    for one in result["records"]:
        if "refused" in one:
            refused.setdefault(one["refused"], {})[one["arm"]] = None
    return found + [f"Refused: {', '.join(arms)}: {why}" for why, arms in refused.items()]


def differences(record: Record, other: Record, measure: str) -> Difference | None:
    """The difference of two records of a case, paired by text or question; None without figures."""
    if "figures" not in record or "figures" not in other or record == other:
        return None
    return paired(record["figures"][measure], other["figures"][measure])


def plotting(file: Path) -> Any:
    """The plotting library; raises ValueError if it is missing or cannot write such a file."""
    if file.suffix not in (".svg", ".png", ".html", ".json"):
        raise ValueError(f"{file} is not a plot, expected .svg, .png, .html or .json")
    try:
        return importlib.import_module("altair")
    except ImportError as error:
        raise ValueError("a plot needs altair: pip install 'mlx-h2o[evaluate]'") from error


def plot(result: Result, file: Path, task: str = "loss") -> None:
    """Write the loss above the full cache's against bytes, as .svg, .png, .html or .json.

    Raises ValueError if altair is not installed, or nothing of the task was measured.
    """
    points, every = [], _records(result)
    for (_, arm, case), one in every.items():
        full = every.get((None, "full", case))
        if case[0] != task or "loss" not in one.get("figures", {}) or not full:
            continue
        apart = differences(one, full, "loss") or Difference(0.0, math.nan, math.nan)
        ends = {} if math.isnan(apart.low) else {"low": apart.low, "high": apart.high}
        share = one["bytes"] / full["bytes"]
        points.append({"cache": arm, "share": share, "loss": apart.mean, **ends})
    if not points:
        raise ValueError(f"nothing of the task {task} was measured beside the full cache")
    altair = plotting(file)
    x = altair.X("share:Q", title="bytes of the full cache's").scale(type="log")
    axes = {"x": x, "color": altair.Color("cache:N", sort=None)}
    loss = altair.Y("loss:Q", title="nats a token above the full cache")
    chart = altair.Chart(altair.Data(values=points)).properties(width=560, height=360)
    lines = chart.mark_line(point=True).encode(y=loss, **axes)
    lines += chart.mark_rule(opacity=0.5).encode(y="low:Q", y2="high:Q", **axes)
    lines.save(str(file), **({"inline": True} if file.suffix == ".html" else {}))  # loads nothing


def _records(result: Result) -> dict[tuple[str | None, str, tuple[str, int]], Record]:
    """The records by share, arm and case: the task, and the length of its texts in tokens."""
    every = result["records"]
    return {(one["share"], one["arm"], (one["task"], one["tokens"])): one for one in every}


def _held(every: Mapping[tuple[Any, ...], Record], arm: str) -> str:
    """The bytes of an arm with its own size, relative to the full cache's."""
    for (share, name, case), one in every.items():
        full = every.get((None, "full", case), {})
        if (share, name) == (None, arm) and "bytes" in one and "bytes" in full:
            return f"{one['bytes'] / full['bytes']:.2f}"
    return "-"


def _interval(apart: Difference | None) -> str:
    if apart is None or math.isnan(apart.low):
        return "-"
    return f"[{apart.low:+.3f}, {apart.high:+.3f}]"
