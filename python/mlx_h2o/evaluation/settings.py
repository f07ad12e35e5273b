"""What all arms of an evaluation share."""

from __future__ import annotations

from dataclasses import dataclass

from .arms import PINNED
from .facts import WORDINGS

__all__ = ["PROMPT", "Settings"]

PROMPT = PINNED
"""Tokens of a text that are read before the first is predicted."""


@dataclass(frozen=True)
class Settings:
    """What all arms share.

    documents: texts of each task.
    length: tokens of each where losses are measured.
    step: tokens that are read at once where losses are measured: of more than one the later see
        the earlier, whatever the budget is.
    lengths: tokens of texts with facts, and of a chat.
    facts: facts in each text.
    wordings: of WORDINGS, in turn.
    writing: tokens to write.
    ruler: a file of RULER's samples.
    seed: draws facts, tokens that are written, and rows that random policies keep.

    Raises ValueError, of one line, naming what is out of range.
    """

    documents: int = 4
    length: int = 768
    step: int = 1
    lengths: tuple[int, ...] = (1000, 2000, 4000)
    facts: int = 16
    wordings: tuple[str, ...] = tuple(name for name in WORDINGS if name != "secret")
    writing: int = 6000
    ruler: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("documents", "step", "facts", "writing"), 1)
        counts |= {"length": PROMPT + 2, "seed": 0}
        for name, least in counts.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {least}")
        for length in self.lengths:
            if length < 40 * self.facts:
                raise ValueError(
                    f"lengths has {length}, expected at least {40 * self.facts}: 40 for each fact"
                )
