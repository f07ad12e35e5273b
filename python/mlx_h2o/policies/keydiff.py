"""keydiff: keep the rows whose keys differ most from the average key."""

from __future__ import annotations

import mlx.core as mx

from ..operations.backends import resolve
from .base import Policy, Rows


class KeyDiff(Policy):
    """Rank of a row: minus the cosine of its key with the mean normalised key of its head.

    The mean is taken over all rows stored when rows must go, in float32. It needs no scores, so
    it works without routing.
    """

    name = "keydiff"

    def rank(self, rows: Rows) -> mx.array:
        return resolve().key_diversity(rows.keys)
