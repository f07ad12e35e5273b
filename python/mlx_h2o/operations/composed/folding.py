"""Rows that go are folded into rows that stay: the definition, in plain MLX operations.

All arithmetic is float32. A back end may bring ``fold``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

from mlx_h2o.operations.composed.buffers import gathered
from mlx_h2o.operations.composed.compaction import LAST, marked

LEAST_WEIGHT = 1e-9
"""A row weighs this much at least, so that a mean of rows without weight is one."""


class Folded(NamedTuple):
    """The rows that change, one for each row that goes.

    ``into`` are their slots, uint32 [B, H, r], the same one more than once where several rows go
    there; then keys [B, H, r, D], values, ``bias`` and ``mass``, float32 [B, H, r], of the rows
    there. A row that is not folded has its own slot, and stays what it is.
    """

    into: mx.array
    keys: mx.array
    values: mx.array
    bias: mx.array
    mass: mx.array


def features(keys: mx.array, values: mx.array) -> mx.array:
    """Vectors [B, H, N, D + Dv] whose squared distance says how much attention tells rows apart.

    That of the logits, for queries of the size of the keys in all directions and the usual scale
    of ``D ** -0.5``; and that of the values over their mean square.
    """
    keys, values = keys.astype(mx.float32), values.astype(mx.float32)
    size, value_size = keys.shape[3], values.shape[3]
    logits = mx.sqrt(_mean_square(keys) / size)
    scale = mx.rsqrt(mx.maximum(_mean_square(values) * value_size, 1e-12))
    return mx.concatenate([keys * logits, values * scale], axis=3)


def _mean_square(rows: mx.array) -> mx.array:
    return mx.mean(mx.square(rows), axis=(2, 3), keepdims=True)


def fold(
    keys: mx.array,
    values: mx.array,
    bias: mx.array,
    mass: mx.array,
    weights: mx.array,
    eligible: mx.array,
    kept: mx.array,
    share: float = 1.0,
) -> Folded:
    """Fold each row that goes into the nearest row that stays and is eligible.

    Its key and value become means by weight, ``(w x + sum w_i x_i) / (w + sum w_i)``; counts, of
    which ``bias`` is the logarithm, and masses add up. All rows that go to a row enter its mean
    together, so that no order matters. O(r * N) distances per head.

    Args:
        keys: [B, H, N, D].
        values: [B, H, N, Dv].
        bias: ``ln n`` of the n rows that each stands for, float32 [B, H, N].
        mass: what adds up with the rows, float32 [B, H, N].
        weights: of the rows in means, float32 [B, H, N]; at least 1e-9 counts. A row that goes with
            NaN is not folded.
        eligible: bool [B, H, N], the rows that others may be folded into, if they stay.
        kept: uint32 [B, H, K], ascending, K < N: the slots that stay. The others go.
        share: of the rows of a head that go, rounded up, those that are folded: the nearest; of
            equals the first. Above 0, at most 1.
    """
    marks = marked(kept, keys.shape[2])
    going = mx.sort(marks, axis=2)[:, :, : keys.shape[2] - kept.shape[2]]
    vectors = features(keys, values)
    squares = mx.sum(vectors * vectors, axis=3)
    apart = mx.addmm(
        mx.expand_dims(squares, 2), gathered(vectors, going), vectors.swapaxes(2, 3), alpha=-2.0
    )
    # Rows at no finite distance stay apart: NaN would reach all others.
    free = eligible & (marks == LAST) & (squares < mx.inf)
    apart = mx.where(mx.expand_dims(free, 2), apart, mx.inf)
    least = mx.min(apart, axis=3) + gathered(squares, going)
    least = mx.where(mx.isnan(least + gathered(weights, going)), mx.inf, least)
    lost = least == mx.inf
    if share < 1:
        place = mx.argsort(mx.argsort(least, axis=2), axis=2)
        lost = lost | (place >= math.ceil(share * going.shape[2]))
    nearest = mx.where(lost, LAST, mx.argmin(apart, axis=3))
    into = mx.where(lost, going, nearest)
    slots = mx.expand_dims(into, 3)
    meets = slots == mx.expand_dims(nearest, 2)
    weights = mx.where(weights > LEAST_WEIGHT, weights, LEAST_WEIGHT)  # that of NaN too
    parts = [weights, mx.exp(bias), mass]
    weights, *others = (mx.expand_dims(part, 3) for part in parts)
    # What adds up, side by side; a mean is a sum by weight over the sum of the weights.
    whole = mx.concatenate([weights * keys, weights * values, weights, *others], axis=3)
    added = mx.where(mx.expand_dims(lost, 3), 0.0, gathered(whole, going))  # 0 * NaN is NaN
    whole = gathered(whole, slots) + meets.astype(mx.float32) @ added
    size = keys.shape[3]
    end = size + values.shape[3]
    new_keys, new_values, total, count, mass = mx.split(
        whole, [size, end, end + 1, end + 2], axis=3
    )
    return Folded(
        into,
        (new_keys / total).astype(keys.dtype),
        (new_values / total).astype(values.dtype),
        mx.log(count).squeeze(3),
        mass.squeeze(3),
    )
