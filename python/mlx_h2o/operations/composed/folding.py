"""The definition of folding evicted rows into rows that stay: plain MLX operations in float32."""

import math
from typing import NamedTuple

import mlx.core as mx

from mlx_h2o.operations.composed.buffers import LAST, gathered, marked

LEAST_WEIGHT = 1e-9
"""Lower bound of a row's weight, so that rows without weight still have a mean."""


class Folded(NamedTuple):
    """The rows that change, one entry for each evicted row.

    ``into`` are slots, uint32 [B, H, r], repeated if several rows are folded into the same; then
    the new keys [B, H, r, D], values, ``bias`` and ``mass``, float32 [B, H, r], of these slots. The
    entry of a row that is not folded is its own slot, with what is there already.
    """

    into: mx.array
    keys: mx.array
    values: mx.array
    bias: mx.array
    mass: mx.array


def features(keys: mx.array, values: mx.array) -> mx.array:
    """Vectors [B, H, N, D + Dv] whose squared distance says how much attention tells rows apart.

    It is the squared difference of logits, for queries as large as the keys in all directions and
    with the usual scale ``D ** -0.5``, plus that of the values, over their mean square.
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
    """Fold each evicted row into the nearest eligible row that stays.

    Keys and values become weighted means, ``(w x + sum w_i x_i) / (w + sum w_i)``. Masses add up,
    and so do counts, of which ``bias`` is the logarithm. All rows folded into a row enter its mean
    together, so their order does not matter. O(r * N) distances per head.

    Args:
        keys: [B, H, N, D].
        values: [B, H, N, Dv].
        bias: ``ln n`` for a row that stands for n rows, float32 [B, H, N].
        mass: adds up when rows are folded, float32 [B, H, N].
        weights: weights of rows in means, float32 [B, H, N], at least 1e-9. An evicted row with
            weight NaN is not folded.
        eligible: bool [B, H, N], the rows that others may be folded into, if they stay.
        kept: uint32 [B, H, K], ascending, K < N: the slots that stay. The others are evicted.
        share: the share of a head's evicted rows to fold, rounded up: the nearest ones, the first
            among equals. Above 0, at most 1.
    """
    marks = marked(kept, keys.shape[2])
    going = mx.sort(marks, axis=2)[:, :, : keys.shape[2] - kept.shape[2]]
    vectors = features(keys, values)
    squares = mx.sum(vectors * vectors, axis=3)
    apart = mx.addmm(
        mx.expand_dims(squares, 2), gathered(vectors, going), vectors.swapaxes(2, 3), alpha=-2.0
    )
    # Nothing is folded into rows that are not finite: NaN would reach all others.
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
    weights = mx.where(weights > LEAST_WEIGHT, weights, LEAST_WEIGHT)  # for NaN too
    parts = [weights, mx.exp(bias), mass]
    weights, *others = (mx.expand_dims(part, 3) for part in parts)
    # All sums side by side; a mean is the weighted sum over the sum of the weights.
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
