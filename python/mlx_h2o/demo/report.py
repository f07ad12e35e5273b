"""Show the demo: progress and text on a terminal, the table everywhere, the figures as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mlx_h2o import evaluate
from mlx_h2o.demo.measure import REPEATS, STEP, ArmResult, Settings
from mlx_h2o.evaluation.environment import environment, environment_line
from mlx_h2o.evaluation.facts import PlantedText

__all__ = ["QuietReporter", "TerminalReporter", "as_json", "table"]

RECALL_THRESHOLD = 0.8


class QuietReporter:
    """Says nothing while the demo runs: for pipes and log files."""

    def __enter__(self) -> QuietReporter:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def stage(self, arm: str, stage: str) -> evaluate.Progress:
        return lambda done, total: None

    def text(self, arm: str, segment: str) -> None:
        pass


class TerminalReporter:
    """A progress bar per stage and the text as it is generated, on a terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[arm]:12}"),
            TextColumn("{task.description:10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._texts: dict[str, Text] = {}
        self._live = Live(self._render(), console=console, refresh_per_second=8)

    def __enter__(self) -> TerminalReporter:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def stage(self, arm: str, stage: str) -> evaluate.Progress:
        task = self._progress.add_task(stage, arm=arm, total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)

    def text(self, arm: str, segment: str) -> None:
        self._texts.setdefault(arm, Text()).append(segment)
        self._live.update(self._render())

    def _render(self) -> Group:
        panels = [Panel(text, title=arm, title_align="left") for arm, text in self._texts.items()]
        return Group(*panels, self._progress)


Speeds = Mapping[str, Sequence[float]]


def table(
    results: Sequence[ArmResult], speeds: Speeds, text: PlantedText, settings: Settings
) -> Table:
    """One column per arm, one row per measure. The first result is the full cache."""
    full = results[0]
    grid = Table(title=f"{len(text.tokens)} tokens, {settings.model}", title_justify="left")
    grid.add_column("")
    for result in results:
        grid.add_column(result.name, justify="right")

    def row(label: str, cell: Callable[[ArmResult], str]) -> None:
        grid.add_row(label, *(cell(result) for result in results))

    row("KV cache, KB", lambda r: f"{r.kv_bytes / 1e3:.0f}")
    row("of the full cache's", lambda r: f"1/{full.kv_bytes / r.kv_bytes:.0f}")
    row("perplexity", lambda r: f"{evaluate.perplexity(r.forced):.2f}")
    row("same top token", lambda r: f"{evaluate.top1_agreement(r.forced, full.forced):.1%}")
    if recall_counts(full):
        row(
            "facts recalled",
            lambda r: f"{sum(r.facts_recalled)} of {len(r.facts_recalled)}",
        )
    row("tokens/s", lambda r: f"{median(speeds[r.name]):.0f}")
    row("peak reading, MB", lambda r: f"{r.peak_prefill / 1e6:.1f}")
    row("peak writing, MB", lambda r: f"{r.peak_decode / 1e6:.1f}")
    return grid


def recall_counts(full: ArmResult) -> bool:
    """Whether the full cache recalls enough to blame a loss of recall on the other caches."""
    return sum(full.facts_recalled) >= RECALL_THRESHOLD * len(full.facts_recalled)


def footnotes(results: Sequence[ArmResult]) -> list[str]:
    """What a reader needs to know beside the table."""
    full = results[0]
    notes = [
        f"Speeds are medians of {REPEATS}, the caches taking turns. The KV cache counts rows of "
        "16 bits; a CPU computes in 32. Peaks include the model's weights. Perplexity and "
        f"agreement are over the {len(full.forced.losses)} tokens after the first "
        f"{full.forced.first}, {STEP} read at a time. One text: a demonstration, not a study.",
        environment_line(),
    ]
    if not recall_counts(full):
        notes.insert(
            0,
            "Planted facts are left out: the full cache itself recalls "
            f"{sum(full.facts_recalled)} of {len(full.facts_recalled)}, under "
            f"{RECALL_THRESHOLD:.0%}.",
        )
    return notes


def as_json(
    results: Sequence[ArmResult], speeds: Speeds, text: PlantedText, settings: Settings
) -> dict[str, Any]:
    """All that the table shows, unrounded, with settings, facts and environment."""
    full = results[0]
    return {
        "environment": environment(),
        "settings": {
            "model": settings.model,
            "tokens": len(text.tokens),
            "chunk": settings.chunk,
            "generate": settings.generate,
            "facts": list(text.facts),
            "predicted_from": full.forced.first,
        },
        "recall_counts": recall_counts(full),
        "arms": [
            {
                "name": result.name,
                "tokens_per_second": list(speeds[result.name]),
                "kv_bytes": result.kv_bytes,
                "peak_prefill_bytes": result.peak_prefill,
                "peak_decode_bytes": result.peak_decode,
                "evicted_rows_per_layer": result.evicted_rows_per_layer,
                "perplexity": evaluate.perplexity(result.forced),
                "top1_agreement": evaluate.top1_agreement(result.forced, full.forced),
                "facts_recalled": list(result.facts_recalled),
                "generated": result.generated,
            }
            for result in results
        ],
    }
