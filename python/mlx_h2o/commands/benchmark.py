"""`mlx_h2o benchmark`: mlx_lm's command of this name with caches that evict."""

from __future__ import annotations

from collections.abc import Sequence

from .hosted import run as _run

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Run it with the command line's arguments; returns the exit status."""
    return _run("benchmark", arguments)
