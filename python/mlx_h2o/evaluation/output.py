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
from .tables import Result, divisions, markdown, notes, table

__all__ = ["as_csv", "as_json", "as_markdown", "failures", "write"]


def write(folder: Path, found: Evaluation, command: str) -> list[Path]:
    """Write results.json, results.csv, results.md and quality.png; returns the files written.

    Without matplotlib there is no picture.
    """
    lines = summaries(found)
    result = as_json(found, lines, command)
    texts = {
        "results.json": json.dumps(result, indent=1) + "\n",
        "results.csv": as_csv(lines),
        "results.md": as_markdown(result),
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
        "measurements": [
            {name: value for name, value in record.items() if name != "held"}
            for record in found.records
        ],
        "recorded": _recorded(found),
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


def as_markdown(result: Result) -> str:
    """The tables, with the notes and what the figures depend on."""
    parts = [f"# {result['model'] or 'Evaluation'}", markdown(table(result))]
    for said, rows in divisions(result).items():
        parts += [f"{said}:", markdown(rows)]
    parts.append("\n".join(f"- {note}" for note in notes(result)))
    environment = ", ".join(f"{name} {said}" for name, said in result["environment"].items())
    parts.append(f"`{result['command']}`")
    parts.append(
        f"{environment}; weights {result['fingerprint'][:12]}, text {result['text_hash'][:12]}."
    )
    return "\n\n".join(parts) + "\n"


def failures(found: Evaluation) -> list[str]:
    """What failed, and why, once each."""
    said = {
        f"FAILED: {one['strategy']}, {one['case']['task']}: {one['error']}": None
        for one in found.records
        if "error" in one
    }
    return list(said)


def _numbers(one: Difference) -> dict[str, float | None]:
    low, high = (None if math.isnan(end) else end for end in (one.low, one.high))
    return {"mean": one.mean, "low": low, "high": high}


def _recorded(found: Evaluation) -> dict[str, Any]:
    """By task: the text, as `pieces` and `facts`, and by strategy what its caches held of it."""
    recorded: dict[str, Any] = {task: {**text, "held": {}} for task, text in found.texts.items()}
    for record in found.records:
        task = record["case"]["task"]
        if "held" in record and task in recorded:
            recorded[task]["held"][record["strategy"]] = record["held"]
    return {task: text for task, text in recorded.items() if text["held"]}
