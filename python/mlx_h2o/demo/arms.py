"""The caches that the demo compares, all but the first two in the same number of bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_h2o.evaluation import arms as evaluation
from mlx_h2o.lm.prompt_cache import evicting_caches

__all__ = ["TENTH", "Arm", "arms"]

TENTH = 10
"""What part of the full cache's bytes the bounded ones get, unless the caller says how many."""

_BOUNDED = {
    "rotating": evaluation.ARMS["window"],
    "keydiff 4 bits": evaluation.Arm("", settings={"policy": "keydiff", "kv_bits": 4}),
    "ours": evaluation.ARMS["ours"],
}


@dataclass(frozen=True)
class Arm:
    """A cache for one model and length of text.

    rows: rows per head, None for the whole text.
    nbytes: bytes that it holds of the text, over all layers, at most.
    evicts: whether the text is longer than its rows.
    """

    name: str
    rows: int | None
    nbytes: int
    evicts: bool
    make: Callable[[], list[Any]]


def arms(model: Any, tokens: int, nbytes: int | None = None) -> list[Arm]:
    """The full cache, first, as the others are compared with it, mlx_lm's of 4 bits, and those of
    so many bytes: by default a tenth of what the full cache holds of ``tokens`` tokens.

    Bytes are those of rows of 16 bits an element, although a CPU computes in 32.

    Raises ValueError: fewer bytes than the least rows of a cache take.
    """
    sizes = evaluation.Sizes(model)
    limit = sizes.full(tokens) // TENTH if nbytes is None else nbytes

    def arm(name: str, kind: evaluation.Arm) -> Arm:
        made = sizes.made(kind, tokens, limit)
        rows = _rows(made.make())
        return Arm(name, rows, made.nbytes, rows is not None and rows < tokens, made.make)

    whole = {"full cache": evaluation.ARMS["full"], "full 4 bits": evaluation.ARMS["kv4"]}
    return [arm(name, kind) for name, kind in (whole | _BOUNDED).items()]


def _rows(caches: list[Any]) -> int | None:
    """The fewest rows of a layer that has a limit."""
    limits = [cache.config.max_kv_size for cache in evicting_caches(caches)]
    limits += [getattr(cache, "max_size", None) for cache in caches]
    return min((limit for limit in limits if limit is not None), default=None)
