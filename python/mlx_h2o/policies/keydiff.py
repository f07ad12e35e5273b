"""keydiff: keep the rows whose keys differ most from the average key."""

from __future__ import annotations

import mlx.core as mx

from .base import Policy, Rows

__all__ = ["KeyDiff"]

_LEAST_NORM = 1e-12  # a key of zeros gets the cosine 0, not NaN


class KeyDiff(Policy):
    """Rank of a row: minus the cosine of its key with the mean normalised key of its head.

    The mean is taken over all rows stored when rows must go, in float32. It needs no scores, so
    it works without routing.
    """

    name = "keydiff"

    def rank(self, rows: Rows) -> mx.array:
        directions = _normalised(rows.keys.astype(mx.float32))
        mean = _normalised(mx.mean(directions, axis=2, keepdims=True))
        cosine = directions @ mx.swapaxes(mean, -1, -2)
        return -mx.squeeze(cosine, -1)


def _normalised(vectors: mx.array) -> mx.array:
    norm = mx.sqrt(mx.sum(mx.square(vectors), axis=-1, keepdims=True))
    return vectors / mx.maximum(norm, _LEAST_NORM)
