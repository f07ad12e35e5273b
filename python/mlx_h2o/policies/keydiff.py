"""keydiff: keep the rows whose keys differ most from the average key."""

import mlx.core as mx

from ..operations.backends import resolve
from .base import Policy, Rows


class KeyDiff(Policy):
    """Ranks rows by the negated cosine of their key with the mean normalised key of the head.

    The mean is computed at each eviction over all stored rows, in float32. The policy needs no
    scores, so it works without routing.
    """

    name = "keydiff"

    def rank(self, rows: Rows) -> mx.array:
        return resolve().key_diversity(rows.keys)
