"""merge: rows that would go become part of the rows that are most like them."""

from __future__ import annotations

import mlx.core as mx

from ..operations.backends import resolve
from .base import Policy, Rows


class Merge(Policy):
    """The pair of rows whose merger changes attention least becomes one row.

    Its key and value are means weighted by how much attention each row is likely to get, by the
    rank of ``keydiff``; what it accumulates is ``ln n`` of the n rows in it, which attention adds
    to its logit. So it needs attention of ours, and no scores.
    """

    name = "merge"
    merges = True

    def rank(self, rows: Rows) -> mx.array:
        """That of ``keydiff``: how unlike the others a row is."""
        return resolve().key_diversity(rows.keys)
