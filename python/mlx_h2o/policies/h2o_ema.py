"""h2o-ema: keep the rows whose logits have been large (AtomGradient 2026, sec. 3.2)."""

from dataclasses import dataclass

from ..errors import check_share
from .base import ByScores


@dataclass(frozen=True)
class H2OEma(ByScores):
    """Ranks rows by a moving average of the absolute logit: ``C = a*C + (1-a)*|s|``.

    ``s`` is the mean over the query heads of the group. The first score sets ``C = |s|``. The paper
    starts at 0, which puts rows that leave a short recent window at a disadvantage.

    Args:
        decay: ``a``, at least 0 and below 1.
    """

    name = "h2o-ema"
    needs_positions = False
    kind = "ema"
    decay: float = 0.95

    def __post_init__(self) -> None:
        check_share("decay", self.decay)
