"""Quality against bytes, as a picture; matplotlib is imported only here."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .summary import Summary

__all__ = ["draw"]

_PANELS = {
    "loss": "loss above the full cache, nats",
    "kld": "KL divergence, nats",
    "recall": "facts recalled",
}


def draw(path: Path, lines: Sequence[Summary]) -> bool:
    """Write a PNG with a panel per measure; False where matplotlib is not installed."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
        ticker: Any = importlib.import_module("matplotlib.ticker")
    except ImportError:
        return False
    measures = [name for name in _PANELS if any(line.measure == name for line in lines)]
    if not measures:
        return False
    figure = figures.Figure(figsize=(6.5 * len(measures), 5), layout="constrained")
    for axes, measure in zip(
        figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True
    ):
        _panel(axes, [line for line in lines if line.measure == measure], measure, ticker)
    figure.savefig(path, dpi=120)
    return True


def _panel(axes: Any, lines: Sequence[Summary], measure: str, ticker: Any) -> None:
    families = list(dict.fromkeys(_family(line) for line in lines))
    for line in lines:
        strategy = line.arm.strategy
        bits = strategy.settings.get("kv_bits")
        x, y, low, high = line.arm.nbytes / 1e6, line.value, math.nan, math.nan
        if measure == "loss":
            to = line.differences.get("full")
            y = to.mean if to is not None else 0.0
            if to is not None:
                low, high = y - to.low, to.high - y
        colour = f"C{families.index(_family(line)) % 10}"
        error = None if math.isnan(low) else [[max(0.0, low)], [max(0.0, high)]]
        marker = "o" if bits is None else "s"
        axes.errorbar(
            x, y, error, fmt=marker, color=colour, capsize=3,
            markerfacecolor="none" if line.arm.control else colour,
        )  # fmt: skip
        axes.annotate(line.arm.name, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda megabytes, place: f"{megabytes:g}")
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    if measure == "recall":
        axes.yaxis.set_major_formatter(lambda share, place: f"{share:.0%}")
    axes.margins(0.08)
    axes.set_xlabel("KV cache, MB")
    axes.set_ylabel(_PANELS[measure])
    axes.grid(alpha=0.3)


def _family(line: Summary) -> str:
    """What is drawn in one colour."""
    return line.arm.strategy.policy or line.arm.strategy.kind
