"""mix: key diversity and a little attention mass, combined by rank."""

from typing import ClassVar

import mlx.core as mx

from ..operations.backends import resolve
from .base import Rows
from .h2o_sum import H2OSum
from .weights import order


class Mix(H2OSum):
    """Ranks rows by four times their place in the order of ``keydiff`` plus that of ``h2o-sum``.

    Places are added instead of values, since a cosine and a mass have no common scale. Their sum is
    an integer, so ties are exact. Reads and sorts all keys once per eviction.
    """

    name = "mix"
    diversity_share: ClassVar[int] = 4

    def rank(self, rows: Rows) -> mx.array:
        diversity = order(resolve().key_diversity(rows.keys), rows.positions)
        mass = order(rows.importance, rows.positions)
        mixed = self.diversity_share * diversity + mass
        return mx.where(mx.isnan(rows.importance), mx.nan, mixed)
