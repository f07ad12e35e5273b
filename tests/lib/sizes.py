"""Which part of its tests ``nox -s exhaustive`` runs, and how many random examples are tried."""

import os

EXHAUSTIVE = os.environ.get("MLX_H2O_EXHAUSTIVE") == "1"
# Which of its tests, and of seeded faults, run: every 32nd from the third on is "3/32".
FIRST, EACH = map(int, os.environ.get("MLX_H2O_PART", "0/1").split("/"))


def examples(many: int) -> int:
    """``many``, or a tenth of it in a plain run; for tests with the marker ``examples``."""
    return many if EXHAUSTIVE else max(5, many // 10)
