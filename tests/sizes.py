"""How much ``nox -s exhaustive`` tries, and how many of the random examples a plain run."""

from __future__ import annotations

import os

EXHAUSTIVE = os.environ.get("MLX_H2O_EXHAUSTIVE") == "1"
_eighth = os.environ.get("MLX_H2O_EIGHTH")
# Which eighth of that session's tests runs, 0 to 7; None: all of them.
EIGHTH = int(_eighth) % 8 if EXHAUSTIVE and _eighth else None


def examples(many: int) -> int:
    """``many``, or a tenth of it in a plain run; for tests with the marker ``examples``."""
    return many if EXHAUSTIVE else max(5, many // 10)
