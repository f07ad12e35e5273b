"""Progress of a command: a bar in a terminal, otherwise a line every few seconds."""

import sys
import time
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Watch(AbstractContextManager["Watch"]):
    """Shows progress on standard error.

    Args:
        every: seconds between lines, outside of a terminal.
    """

    def __init__(self, every: float = 5.0) -> None:
        self._every, self._said = every, ""
        self._began = self._spoke = time.monotonic()
        said = TextColumn("{task.description}", markup=False)
        columns = said, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("")

    def __exit__(self, *error: object) -> None:
        """Remove the bar."""
        if self._bar.live.is_started:
            self._bar.stop()

    def __call__(self, said: str, done: int, total: int) -> None:
        """Report progress of some work; a total of 0 means that its caches are being sized."""
        now, is_new = time.monotonic(), said != self._said
        if is_new:
            self._said, self._began = said, now
        if self._bar.console.is_terminal:
            if is_new:
                self._bar.reset(self._task, description=said)
            self._bar.tasks[0].total = total or None
            self._bar.start()
            self._bar.update(self._task, completed=done)
            if done >= total > 0:
                self._bar.stop()
        elif now >= self._spoke + self._every:
            self._spoke = now
            what = f"{done} of {total}, {now - self._began:.0f} s" if total else "sizing its caches"
            print(f"{said}: {what}", file=sys.stderr, flush=True)
