"""The caches that the demo compares, all but the first two in the same number of bytes."""

from dataclasses import replace
from typing import Any

from mlx_h2o.evaluation.arms import Arm, Footprint, resolve
from mlx_h2o.evaluation.strategies import parse

__all__ = ["TENTH", "arms"]

TENTH = 10
"""What part of the full cache's bytes the bounded ones get, unless the caller says how many."""

_BOUNDED = {
    "rotating": "rotating",
    "keydiff 4 bits": "keydiff:kv4:group=64",
    "merge 4 bits": "merge:kv4:group=64",
}


def arms(model: Any, tokens: int, nbytes: int | None = None) -> list[Arm]:
    """The full cache, first, as the others are compared with it, mlx_lm's of 4 bits, and those of
    so many bytes: by default a tenth of what the full cache holds of ``tokens`` tokens.

    Bytes are those of rows of 16 bits an element, although a CPU computes in 32.

    Raises ValueError: fewer bytes than the least rows of a cache take.
    """
    footprint = Footprint(model)

    def arm(name: str, strategy: str) -> Arm:
        return replace(resolve(footprint, parse(strategy), tokens), name=name)

    full = arm("full cache", "full")
    limit = full.nbytes // TENTH if nbytes is None else nbytes
    bounded = (arm(name, f"{strategy}:bytes={limit}") for name, strategy in _BOUNDED.items())
    return [full, arm("full 4 bits", "kv4"), *bounded]
