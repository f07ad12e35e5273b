"""The tables of a result, as `results.json` holds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from .summary import DIVISIONS, OF_LAYERS

__all__ = ["Result", "Table", "divisions", "markdown", "notes", "table"]

Result = Mapping[str, Any]
"""What :func:`mlx_h2o.evaluation.output.as_json` makes."""

Table = list[list[str]]
"""Lines of cells; the first is the head."""


def table(result: Result) -> Table:
    """One line per strategy; columns of what was measured."""
    by = _by_measure(result)
    measured = {measure for _, measure in by}
    head = ["cache", "rows", "bytes"]
    if "loss" in measured:
        head += ["perplexity", "loss to full", "loss to window", "KLD", "same top token"]
    if "recall" in measured:
        head += ["recall", "recall to window"]
    last = f": {list(OF_LAYERS)[-1]}"
    skipped = [one.removesuffix(last) for _, one in by if one.endswith(last)]
    skipped = list(dict.fromkeys(skipped))
    head += [f"{one}: {' / '.join(OF_LAYERS)}" for one in skipped]
    rows = [head]
    for arm in result["strategies"]:
        name = f"{arm['name']} (control)" if arm["control"] else arm["name"]
        cells = [name, "all" if arm["rows"] is None else f"{arm['rows']:,}", f"{arm['bytes']:,}"]
        loss, recall = (by.get((arm["name"], measure)) for measure in ("loss", "recall"))
        if "loss" in measured:
            cells += [
                "-" if loss is None else f"{math.exp(loss['value']):.2f}",
                _interval(loss, "full", "+.3f"),
                _interval(loss, "window", "+.3f"),
                _value(by.get((arm["name"], "kld")), ".4f"),
                _value(by.get((arm["name"], "top1")), ".1%"),
            ]
        if "recall" in measured:
            cells += [_value(recall, ".0%"), _interval(recall, "window", "+.0%")]
        for one in skipped:
            of_layers = (by.get((arm["name"], f"{one}: {name}")) for name in OF_LAYERS)
            cells.append(" / ".join(_value(line, ".1%") for line in of_layers))
        rows.append(cells)
    return rows


def divisions(result: Result) -> dict[str, Table]:
    """By what they say: tables of each strategy's figures by length, wording, depth and so on,
    where there are several."""
    found = {"Perplexity by length, and what it is above the full cache's": _divided(
        result, "loss by length ", _perplexity
    )}  # fmt: skip
    for name in DIVISIONS:
        rows = _divided(result, f"recall by {name} ", lambda line: _value(line, ".0%"))
        found[f"Facts recalled, by {name}"] = rows
    return {said: rows for said, rows in found.items() if len(rows[0]) > 2}


def _divided(result: Result, start: str, cell: Callable[[Mapping[str, Any] | None], str]) -> Table:
    """A column for each measure that begins so."""
    by = _by_measure(result)
    columns = list(dict.fromkeys(measure for _, measure in by if measure.startswith(start)))
    rows = [["cache", *(column.removeprefix(start) for column in columns)]]
    for arm in result["strategies"]:
        rows.append([arm["name"], *(cell(by.get((arm["name"], one))) for one in columns)])
    return rows


def _perplexity(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return "-"
    to = line["to"].get("full")
    more = "" if to is None else f" ({math.exp(to['mean']) - 1:+.1%})"
    return f"{math.exp(line['value']):.2f}{more}"


def notes(result: Result) -> list[str]:
    """What a reader must know: the meaning of brackets, and what failed."""
    return [
        *result["notes"],
        "In brackets: 95 % interval of the paired difference, bootstrap over documents and seeds. "
        "The window is mlx_lm's rotating cache of the same bytes, or up to 5 % less.",
        *result["failures"],
    ]


def markdown(rows: Table) -> str:
    """A table, all columns but the first aligned to the right."""
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _by_measure(result: Result) -> dict[tuple[str, str], dict[str, Any]]:
    return {(line["strategy"], line["measure"]): line for line in result["summary"]}


def _value(line: Mapping[str, Any] | None, form: str) -> str:
    return "-" if line is None else format(line["value"], form)


def _interval(line: Mapping[str, Any] | None, other: str, form: str) -> str:
    one = None if line is None else line["to"].get(other)
    if one is None:
        return "-"
    said = format(one["mean"], form)
    if one["low"] is None:
        return said
    return f"{said} [{format(one['low'], form)}, {format(one['high'], form)}]"
