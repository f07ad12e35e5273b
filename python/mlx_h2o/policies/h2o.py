"""h2o: keep heavy and diverse rows (after Zhang et al. 2023, H2O), fold others into them."""

from dataclasses import dataclass

import mlx.core as mx

from ..errors import check_bool, check_share
from ..operations.backends import resolve
from ..operations.composed import beside_rows
from .base import Rows
from .h2o_sum import H2OSum
from .weights import best, greatest_near

FEWEST_RECENT = 32
"""With fewer recent rows than this, quality drops sharply."""

_LEAST = 1e-9
"""Lower bound of the largest product of a head, by which the others are divided."""


@dataclass(frozen=True)
class H2O(H2OSum):
    """Ranks rows by attention mass times value norm, and keeps a share of them for key diversity.

    A row's mass is divided by the root of its age, the number of queries that could see it: the sum
    favours old rows, the mean forgets them. Mass alone loses rows that no query has needed yet,
    diversity alone loses the text. Ranks by mass are relative to the head's largest, so at most 1;
    rows kept for their diversity get 2 more, and nothing is folded into them. Of the evicted rows,
    the nearer half is folded into the nearest rows that stay, weighted by these ranks. Without
    folding, the diversity of a row is the largest among it and the next two rows.

    Args:
        diversity: the share of the rows kept by rank that are kept for the diversity of their keys,
            0 to 1; the others are kept for their attention mass.
        fold: fold evicted rows into others. False: drop them.
    """

    name = "h2o"
    fold_share = 0.5
    diversity: float = 0.5
    fold: bool = True

    def __post_init__(self) -> None:
        check_share("diversity", self.diversity, whole=True)
        check_bool("fold", self.fold)

    @property
    def folds(self) -> bool:
        return self.fold

    def takes(self, ranks: mx.array) -> mx.array:
        return ranks <= 1  # NaN is not

    @classmethod
    def recent_rows(cls, rows: int) -> int:
        """A quarter of the budget, at least FEWEST_RECENT rows, at most half."""
        return max(rows // 4, min(FEWEST_RECENT, rows // 2))

    def rank(self, rows: Rows) -> mx.array:
        age = beside_rows(rows.offset) - rows.positions
        squares = mx.sum(mx.square(rows.values.astype(mx.float32)), axis=3)
        heavy = rows.importance * mx.sqrt(squares / age)
        known = mx.where(heavy > _LEAST, heavy, _LEAST)  # NaN is not
        ranks = heavy / mx.max(known, axis=2, keepdims=True)
        diverse = int(self.diversity * rows.places)
        if not diverse:
            return ranks
        apart = resolve().key_diversity(rows.keys)
        if not self.fold:  # rows before a diverse one help to find it
            apart = greatest_near(apart, rows.positions, 0, 2)
        stay = best(rows, apart, rows.keep - rows.places + diverse)
        return ranks + mx.put_along_axis(mx.zeros(ranks.shape), stay, mx.array(2.0), axis=2)
