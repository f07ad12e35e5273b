"""An evaluation as JSON, CSV, Markdown and a picture."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .run import Evaluation
from .statistics import Difference
from .summary import Summary, summaries, window_of

__all__ = ["as_csv", "as_json", "as_markdown", "failures", "markdown", "notes_of", "table", "write"]

Table = list[list[str]]
"""Lines of cells; the first is the head."""


def write(folder: Path, found: Evaluation, command: str) -> list[Path]:
    """Write results.json, results.csv, results.md and quality.png; returns the files written.

    Without matplotlib there is no picture.
    """
    lines = summaries(found)
    texts = {
        "results.json": json.dumps(as_json(found, lines, command), indent=1) + "\n",
        "results.csv": as_csv(lines),
        "results.md": as_markdown(found, lines, command),
    }
    files = []
    for name, text in texts.items():
        files.append(folder / name)
        files[-1].write_text(text, encoding="utf-8")
    from .picture import draw

    picture = folder / "quality.png"
    return [*files, picture] if draw(picture, lines) else files


def as_json(found: Evaluation, lines: Sequence[Summary], command: str) -> dict[str, Any]:
    """All that was measured, unrounded, with what it depends on."""
    return {
        "command": command,
        **found.setting,
        "notes": list(found.notes),
        "failures": failures(found),
        "strategies": [
            {
                "name": arm.name,
                "asked": arm.strategy.name,
                "rows": arm.rows,
                "bytes": arm.nbytes,
                "control": arm.control,
                "window": getattr(window_of(arm, found.arms), "name", None),
            }
            for arm in found.arms
        ],
        "summary": [
            {
                "strategy": line.arm.name,
                "measure": line.measure,
                "value": line.value,
                "to": {name: _numbers(one) for name, one in line.differences.items()},
            }
            for line in lines
        ],
        "measurements": list(found.records),
    }


def as_csv(lines: Sequence[Summary]) -> str:
    """One line per strategy and measure; differences are empty where there is no interval."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    head = ["strategy", "control", "rows", "bytes", "measure", "value"]
    parts = ("mean", "low", "high")
    head += [f"to_{name}_{part}" for name in ("full", "window") for part in parts]
    writer.writerow(head)
    for line in lines:
        cells: list[Any] = [line.arm.name, int(line.arm.control), line.arm.rows, line.arm.nbytes]
        cells += [line.measure, line.value]
        for name in ("full", "window"):
            one = line.differences.get(name)
            cells += [None] * 3 if one is None else list(_numbers(one).values())
        writer.writerow(cells)
    return file.getvalue()


def as_markdown(found: Evaluation, lines: Sequence[Summary], command: str) -> str:
    """The tables, with the notes and what the figures depend on."""
    parts = [f"# {found.setting['model'] or 'Evaluation'}", markdown(table(found, lines))]
    for division in ("wording", "depth", "needles", "length", "reading"):
        rows = divided(found, lines, division)
        if len(rows[0]) > 2:
            parts += [f"Facts recalled, by {division}:", markdown(rows)]
    parts.append("\n".join(f"- {note}" for note in [*notes_of(found), *failures(found)]))
    environment = ", ".join(f"{name} {said}" for name, said in found.setting["environment"].items())
    parts.append(f"`{command}`")
    parts.append(
        f"{environment}; weights {found.setting['model_hash'][:12]}, "
        f"text {found.setting['text_hash'][:12]}."
    )
    return "\n\n".join(parts) + "\n"


def notes_of(found: Evaluation) -> list[str]:
    """What a reader must know, the meaning of brackets included."""
    return [
        *found.notes,
        "In brackets: 95 % interval of the paired difference, bootstrap over documents and seeds. "
        "The window is mlx_lm's rotating cache of the same bytes, or up to 5 % less.",
    ]


def failures(found: Evaluation) -> list[str]:
    """What failed, and why, once each."""
    said = {
        f"FAILED: {one['strategy']}, {one['case']['task']}: {one['error']}": None
        for one in found.records
        if "error" in one
    }
    return list(said)


def table(found: Evaluation, lines: Sequence[Summary]) -> Table:
    """One line per strategy; columns of what was measured."""
    by = {(line.arm.name, line.measure): line for line in lines}
    measured = {line.measure for line in lines}
    head = ["cache", "rows", "bytes"]
    if "loss" in measured:
        head += ["perplexity", "loss to full", "loss to window", "KLD", "same top token"]
    if "recall" in measured:
        head += ["recall", "recall to window"]
    rows = [head]
    for arm in found.arms:
        name = f"{arm.name} (control)" if arm.control else arm.name
        cells = [name, "all" if arm.rows is None else f"{arm.rows:,}", f"{arm.nbytes:,}"]
        loss, recall = by.get((arm.name, "loss")), by.get((arm.name, "recall"))
        if "loss" in measured:
            cells += [
                "-" if loss is None else f"{math.exp(loss.value):.2f}",
                _interval(loss, "full", "+.3f"),
                _interval(loss, "window", "+.3f"),
                _value(by.get((arm.name, "kld")), ".4f"),
                _value(by.get((arm.name, "top1")), ".1%"),
            ]
        if "recall" in measured:
            cells += [_value(recall, ".0%"), _interval(recall, "window", "+.0%")]
        rows.append(cells)
    return rows


def divided(found: Evaluation, lines: Sequence[Summary], division: str) -> Table:
    """Recall of each strategy, by wording, depth or what else tells facts apart."""
    start = f"recall by {division} "
    by = {(line.arm.name, line.measure): line for line in lines}
    columns = list(dict.fromkeys(one.measure for one in lines if one.measure.startswith(start)))
    rows = [["cache", *(column.removeprefix(start) for column in columns)]]
    for arm in found.arms:
        rows.append([arm.name, *(_value(by.get((arm.name, one)), ".0%") for one in columns)])
    return rows


def markdown(rows: Table) -> str:
    """A table, all columns but the first aligned to the right."""
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _value(line: Summary | None, form: str) -> str:
    return "-" if line is None else format(line.value, form)


def _interval(line: Summary | None, other: str, form: str) -> str:
    one = None if line is None else line.differences.get(other)
    if one is None:
        return "-"
    said = format(one.mean, form)
    if math.isnan(one.low):
        return said
    return f"{said} [{format(one.low, form)}, {format(one.high, form)}]"


def _numbers(one: Difference) -> dict[str, float | None]:
    low, high = (None if math.isnan(end) else end for end in (one.low, one.high))
    return {"mean": one.mean, "low": low, "high": high}
