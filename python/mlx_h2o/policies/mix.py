"""mix: key diversity, and a little attention mass, compared by rank."""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx

from .. import fast
from .base import Rows
from .h2o_sum import H2OSum
from .weights import order


class Mix(H2OSum):
    """Four times the place of a row by ``keydiff``, and its place by ``h2o-sum``.

    Places and not values are added, since a cosine and a mass have no common scale; their sum is
    whole, so that ties are ties. Reads all keys once per eviction, and sorts.
    """

    name = "mix"
    diversity_share: ClassVar[int] = 4

    def rank(self, rows: Rows) -> mx.array:
        diversity = order(fast.key_diversity(rows.keys), rows.positions)
        mass = order(rows.importance, rows.positions)
        mixed = self.diversity_share * diversity + mass
        return mx.where(mx.isnan(rows.importance), mx.nan, mixed)
