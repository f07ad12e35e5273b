"""What goes on while a command works: a bar in a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Watch(AbstractContextManager["Watch"]):
    """Says on standard error what goes on.

    Args:
        every: seconds between lines, if it is no terminal.
    """

    def __init__(self, every: float = 5.0) -> None:
        self._every, self._said = every, ""
        self._began = self._spoke = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            said = TextColumn("{task.description}", markup=False)
            columns = said, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away; the next call shows it again."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, said: str, done: int, total: int) -> None:
        """So much is done of a piece of work; of none, a total of 0, its caches are being sized."""
        if self._bar is not None:
            self._show(self._bar, said, done, total)
            return
        now = time.monotonic()
        if said != self._said:
            self._said, self._began = said, now
        if now >= self._spoke + self._every:
            self._spoke = now
            what = f"{done} of {total}, {now - self._began:.0f} s" if total else "sizing its caches"
            print(f"{said}: {what}", file=sys.stderr, flush=True)

    def _show(self, bar: Progress, said: str, done: int, total: int) -> None:
        if not bar.tasks or bar.tasks[0].description != said:
            for task in bar.task_ids:
                bar.remove_task(task)
            bar.add_task(said, total=total or None)
            bar.start()
        bar.update(bar.task_ids[0], completed=done)
        if done >= total > 0:
            bar.stop()
