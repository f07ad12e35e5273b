"""How many random examples a test tries: a few in a plain run, all in ``nox -s exhaustive``."""

from __future__ import annotations

import os

EXHAUSTIVE = os.environ.get("MLX_H2O_EXHAUSTIVE") == "1"


def examples(many: int) -> int:
    """``many``, or a tenth of it in a plain run; for tests with the marker ``examples``."""
    return many if EXHAUSTIVE else max(5, many // 10)
