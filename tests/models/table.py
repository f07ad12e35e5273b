"""Verdicts as a Markdown table: supported, partly, refused, or not tried, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paths import ROOT

from .check import BUDGET, PROMPT, STEPS, Verdict

__all__ = ["END", "PAGE", "START", "broken", "table"]

PAGE = ROOT / "docs" / "models.md"

START = "<!-- table: nox -s models -->"
END = "<!-- end of table -->"


def broken(verdicts: Sequence[Verdict]) -> list[str]:
    """Everything that is neither served nor refused by the product's own word."""
    return [
        f"{verdict.name}: {kind}: {text}"
        for verdict in verdicts
        for kind, text in _outcomes(verdict).items()
        if text and not text.startswith("[")
    ]


def table(verdicts: Sequence[Verdict], version: str) -> str:
    """The table and its summary line."""
    count = Counter(_status(verdict) for verdict in verdicts)
    said = ", ".join(f"{count[status]} {status}" for status in ("supported", "partly", "refused"))
    lines = [
        f"mlx-lm {version}: {len(verdicts)} model files: {said}, {count['not tried']} not tried. "
        f"Budget {BUDGET} rows, {PROMPT} tokens in two chunks, then {STEPS} one by one.",
        "",
        "| model file | layers that evict | | h2o | keydiff | 8 bits | |",
        "|---|---:|---|:-:|:-:|:-:|---|",
    ]
    return "\n".join(lines + [_row(verdict) for verdict in verdicts])


def _outcomes(verdict: Verdict) -> dict[str, str]:
    return {"h2o": verdict.h2o, "keydiff": verdict.keydiff, "8 bits": verdict.quantised}


def _status(verdict: Verdict) -> str:
    if verdict.absent:
        return "not tried"
    if verdict.refused:
        return "refused"
    return "partly" if any(_outcomes(verdict).values()) else "supported"


def _row(verdict: Verdict) -> str:
    status = _status(verdict)
    if status in ("refused", "not tried"):
        why = _reason(verdict.refused) or verdict.absent
        return f"| {verdict.name} | | {status} | | | | {why} |"
    marks = ["yes" if not text else "no" for text in _outcomes(verdict).values()]
    reasons = dict.fromkeys(_reason(text) for text in _outcomes(verdict).values() if text)
    layers = f"{verdict.evicting} of {verdict.layers}"
    return f"| {verdict.name} | {layers} | {status} | {' | '.join(marks)} | {'; '.join(reasons)} |"


def _reason(text: str) -> str:
    """The cause out of an error: without the operation, the model and what was expected."""
    text = text.partition("] ")[2] or text
    text = text.partition("cannot be served: ")[2] or text
    for end in (": expected", ". Expected", ", expected"):
        text = text.partition(end)[0]
    return text.replace("|", "/")
