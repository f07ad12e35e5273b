"""Verdicts in Markdown: what is supported, and why others are partly so, refused or not tried."""

import textwrap
from collections.abc import Sequence

from paths import ROOT

from .check import BUDGET, PROMPT, STEPS, Verdict

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
    """What is supported, and a table of what is not, or not all of it."""
    names = {status: [] for status in ("supported", "partly", "refused", "not tried")}
    for verdict in verdicts:
        names[_status(verdict)].append(verdict)
    said = ", ".join(f"{len(found)} {status}" for status, found in names.items())
    every = ", ".join(f"`{verdict.name}`" for verdict in names.pop("supported"))
    lines = textwrap.wrap(
        f"mlx-lm {version}: {len(verdicts)} model files: {said}. Budget {BUDGET} rows, {PROMPT} "
        f"tokens in two chunks, then {STEPS} one by one. Supported: {every}.",
        width=100, break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
    rows = [
        f"| {verdict.name} | {status} | {_why(verdict)} |"
        for status, found in names.items()
        for verdict in found
    ]
    return "\n".join([*lines, "", "| model file | | |", "|---|---|---|", *rows])


def _outcomes(verdict: Verdict) -> dict[str, str]:
    return {"h2o": verdict.h2o, "keydiff": verdict.keydiff, "8 bits": verdict.quantised}


def _status(verdict: Verdict) -> str:
    if verdict.absent:
        return "not tried"
    if verdict.refused:
        return "refused"
    return "partly" if any(_outcomes(verdict).values()) else "supported"


def _why(verdict: Verdict) -> str:
    """Why a model is not supported, or which part of it is not."""
    texts = dict.fromkeys(_reason(text) for text in _outcomes(verdict).values() if text)
    return _reason(verdict.refused) or verdict.absent or "; ".join(texts)


def _reason(text: str) -> str:
    """The cause out of an error: without the operation, the model and what was expected."""
    text = text.partition("] ")[2] or text
    text = text.partition("cannot be served: ")[2] or text
    for end in (": expected", ". Expected", ", expected"):
        text = text.partition(end)[0]
    return text.replace("|", "/")
