"""A result of :func:`.run.evaluate` as a table, and as a plot of loss against bytes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..lm.prompt_cache import beyond_context
from .statistics import Difference, paired

__all__ = ["differences", "notes", "plot", "table"]

Result = Mapping[str, Any]
Record = Mapping[str, Any]

_COLUMNS = {
    "loss": (("loss", "loss"), ("kl", "KL"), ("top1", "top 1")),
    "chunks": (("loss", "loss, in chunks"),),
    "facts": (("tokens", "facts"),),
    "turns": (("tokens", "two turns"),),
    "ruler": (("tokens", "RULER"),),
    "writing": (("distinct", "distinct"), ("loss", "loss of what is written")),
}
"""By task: its measures, and how a table calls them."""


def table(
    result: Result,
    arms: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    against: str = "ours",
) -> str:
    """A line for each arm and share of the bytes, as Markdown; of all arms and tasks, or of some.

    Losses are in nats above the full cache's, with the paired 95 % interval of that difference; the
    column "to ours" has the interval of the loss less that of the arm `against`, at the same share.
    Facts are the share of the answers' tokens that are right, with the interval of the difference
    to the full cache's.
    """
    shown = [
        one
        for one in result["records"]
        if (arms is None or one["arm"] in arms) and (tasks is None or one["task"] in tasks)
    ]
    by = {(_line(one), _case(one)): one for one in shown}
    lines = sorted({line for line, _ in by}, key=_order(result))
    of = list(dict.fromkeys(case for _, case in by))
    several = {task for task, tokens in of if sum(task == other for other, _ in of) > 1}
    head = ["of the bytes", "cache"]
    for task, tokens in of:
        for measure, said in _COLUMNS[task]:
            head.append(f"{said}, {tokens:,}" if task in several else said)
            if measure == "loss" and task == "loss":
                head.append(f"to {against}")
    rows = []
    for line in lines:
        share, arm = line
        rows.append([_held(result, line), arm])
        for case in of:
            record = by.get((line, case), {})
            full = by.get(((None, "full"), case), {})
            other = by.get(((share, against), case), {})
            for measure, _ in _COLUMNS[case[0]]:
                loss = measure == "loss" and case[0] != "writing"
                rows[-1].append(_less(record, full) if loss else _mean(record, measure))
                if measure == "tokens":
                    apart = _interval(differences(record, full, measure))
                    rows[-1][-1] += "" if apart == "-" else f" {apart}"
                if loss and case[0] == "loss":
                    rows[-1].append(_interval(differences(record, other, "loss")))
    return "\n".join(
        f"| {' | '.join(row)} |"
        for row in (head, ["---", "---", *["---:"] * (len(head) - 2)], *rows)
    )


def notes(result: Result) -> list[str]:
    """What a reader must know beside the table."""
    settings = result["settings"]
    found = [
        f"{settings['documents']} texts a task. Bytes are those of all layers whose caches grow, "
        "at the text's length, with 16 bits an unquantised element, and scales, scores and "
        "positions; shares are of the full cache's. Intervals of 95 % are paired, by text.",
    ]
    if (step := settings.get("step", 1)) > 1:
        found.append(f"Losses are of texts read {step} tokens at a time.")
    if beyond := beyond_context(result["context"], max(one["tokens"] for one in result["records"])):
        found.append(beyond)
    refused: dict[str, dict[str, None]] = {}
    for one in result["records"]:
        if "refused" in one:
            refused.setdefault(one["refused"], {})[one["arm"]] = None
    return found + [f"Refused: {', '.join(arms)}: {why}" for why, arms in refused.items()]


def differences(record: Record, other: Record, measure: str) -> Difference | None:
    """Of two records of one case, paired by text or question; None where one has no figures."""
    if "figures" not in record or "figures" not in other or record == other:
        return None
    return paired(record["figures"][measure], other["figures"][measure])


def plotting(file: Path) -> Any:
    """What draws; raises ValueError where it cannot draw such a file, or is not installed."""
    if file.suffix not in (".svg", ".png", ".html", ".json"):
        raise ValueError(f"{file} is no plot, expected .svg, .png, .html or .json")
    try:
        return importlib.import_module("altair")
    except ImportError as error:
        raise ValueError("a plot needs altair: pip install 'mlx-h2o[evaluate]'") from error


def plot(result: Result, file: Path, task: str = "loss") -> None:
    """Write the loss above the full cache's against bytes, as .svg, .png, .html or .json.

    Raises ValueError where altair is not installed, or nothing of the task was measured.
    """
    points = []
    for one in result["records"]:
        of = {other["arm"]: other for other in result["records"] if _case(other) == _case(one)}
        if one["task"] != task or "figures" not in one or "full" not in of:
            continue
        apart = differences(one, of["full"], "loss") or Difference(0.0, math.nan, math.nan)
        ends = {} if math.isnan(apart.low) else {"low": apart.low, "high": apart.high}
        share = one["bytes"] / of["full"]["bytes"]
        points.append({"cache": one["arm"], "share": share, "loss": apart.mean, **ends})
    if not points:
        raise ValueError(f"nothing of the task {task} was measured beside the full cache")
    altair = plotting(file)
    x = altair.X("share:Q", title="bytes of the full cache's").scale(type="log")
    axes = {"x": x, "color": altair.Color("cache:N", sort=None)}
    loss = altair.Y("loss:Q", title="nats a token above the full cache")
    chart = altair.Chart(altair.Data(values=points)).properties(width=560, height=360)
    lines = chart.mark_line(point=True).encode(y=loss, **axes)
    (lines + chart.mark_rule(opacity=0.5).encode(y="low:Q", y2="high:Q", **axes)).save(str(file))


def _line(record: Record) -> tuple[str | None, str]:
    return record["share"], record["arm"]


def _case(record: Record) -> tuple[str, int]:
    return record["task"], record["tokens"]


def _order(result: Result) -> Any:
    """The largest share first, what has its own size before all; arms as they were measured."""
    arms = list(dict.fromkeys(one["arm"] for one in result["records"]))
    return lambda line: (
        -Fraction(line[0]) if line[0] else -math.inf,
        arms.index(line[1]),
    )


def _held(result: Result, line: tuple[str | None, str]) -> str:
    """The share, or where the size is the arm's own what it holds."""
    share, _ = line
    if share is not None:
        return share
    for one in result["records"]:
        full: Record = next(
            (o for o in result["records"] if _case(o) == _case(one) and o["arm"] == "full"), {}
        )
        if _line(one) == line and "bytes" in one and "bytes" in full:
            return f"{one['bytes'] / full['bytes']:.2f}"
    return "-"


def _mean(record: Record, measure: str) -> str:
    if "figures" not in record:
        return "-"
    values: Sequence[float] = record["figures"][measure]
    mean = sum(values) / len(values)
    return f"{mean:.4f}" if measure == "kl" else f"{mean:.2f}"


def _less(record: Record, full: Record) -> str:
    """The loss above the full cache's; its own is a number by itself."""
    if "figures" in record and record["arm"] == "full":
        return _mean(record, "loss")
    apart = differences(record, full, "loss")
    return "-" if apart is None else f"{apart.mean:+.3f} {_interval(apart)}"


def _interval(apart: Difference | None) -> str:
    if apart is None or math.isnan(apart.low):
        return "-"
    return f"[{apart.low:+.3f}, {apart.high:+.3f}]"
