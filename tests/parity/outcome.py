"""The result of a leg in a case, and the runner's verdict on it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Outcome:
    """Arrays by name ("out", "scores", "lse"; "keep"; of a trace "positions" too).

    ``refused`` is the reason of a leg that may decline a case; ``error`` is a failure.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    refused: str = ""
    error: str = ""


@dataclass(frozen=True)
class Verdict:
    """One cell: ``ratio`` is worst error / tolerance where the case has errors to measure."""

    ok: bool
    cell: str
    ratio: float | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        finite = self.ratio is not None and np.isfinite(self.ratio)
        found: dict[str, Any] = {"ok": self.ok, "cell": self.cell}
        return found | ({"ratio": self.ratio} if finite else {}) | (
            {"note": self.note} if self.note else {}
        )  # fmt: skip


def failed(note: str) -> Verdict:
    """The cell of a leg that gave nothing to compare."""
    return Verdict(False, "error", note=note)
