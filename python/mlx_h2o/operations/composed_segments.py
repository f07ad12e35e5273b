"""The definition of what serves rows that lie in several arrays, in plain MLX operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from mlx_h2o.operations.arguments import StreamLike
from mlx_h2o.operations.placement import placed

__all__ = ["merge_segments"]


def merge_segments(
    outs: Sequence[mx.array],
    lses: Sequence[mx.array],
    scores: Sequence[mx.array],
    stream: StreamLike = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """The outputs averaged by their shares ``exp(lse_i - lse)`` of the common denominator, the
    log of that, and the scores, one behind the other. A query that sees nothing gives zeros.
    """
    with placed(stream):
        each = mx.stack([*lses], axis=-1)
        whole = mx.logsumexp(each, axis=-1)
        shares = mx.where(mx.expand_dims(whole, -1) == -mx.inf, 0.0, mx.softmax(each, axis=-1))
        # float32 by promotion.
        mixed = sum(out * shares[..., at : at + 1] for at, out in enumerate(outs))
        out = cast(mx.array, mixed).astype(outs[0].dtype)
        return out, whole, mx.concatenate([*scores], axis=-1)
