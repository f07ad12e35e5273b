"""Rows that merge: which pairs cost attention least, and what becomes of them.

In plain MLX operations. All arithmetic is float32.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_h2o.operations import backends
from mlx_h2o.operations.buffers import gathered
from mlx_h2o.operations.compaction import marked
from mlx_h2o.operations.composed import beside_rows
from mlx_h2o.operations.composed_cache import diversity
from mlx_h2o.operations.requests import PerSequence

_PAIRS = 1 << 19
"""Pairs of rows of a head whose costs are in memory at a time."""


SHARPNESS = 3.0
"""Of the ranks in the masses."""


def masses(keys: mx.array, counts: mx.array) -> mx.array:
    """How much of the attention a row is likely to get, float32 [B, H, N].

    By key diversity, in whose mean a row made of n counts sqrt(n) times.

    Args:
        keys: [B, H, N, D].
        counts: how many rows each is made of, float32 [B, H, N].
    """
    ranks = diversity(keys, mx.sqrt(counts))
    return counts * mx.exp(SHARPNESS * ranks)


def features(keys: mx.array, values: mx.array) -> mx.array:
    """Vectors [B, H, N, D + Dv] whose squared distance is what a merger changes.

    That of the logits, for queries of the size of the keys in all directions and the usual scale
    of ``D ** -0.5``; and that of the values over their mean square.
    """
    keys, values = keys.astype(mx.float32), values.astype(mx.float32)
    size = keys.shape[3]
    logits = mx.sqrt(_mean_square(keys) / (size * size))
    return mx.concatenate(
        [keys * logits, values * mx.rsqrt(mx.maximum(_mean_square(values), 1e-12))], axis=3
    )


def _mean_square(rows: mx.array) -> mx.array:
    return mx.mean(mx.sum(rows * rows, axis=3, keepdims=True), axis=2, keepdims=True)


def partners(
    vectors: mx.array, mass: mx.array, free: mx.array, shared: bool = False
) -> tuple[mx.array, mx.array]:
    """The cheapest merger of each row with one in a later slot: cost and slot, [B, H, N].

    Two rows cost ``sqrt(m_i m_j / (m_i + m_j)) |z_i - z_j|^2``; infinity where none may merge.

    Args:
        vectors: float32 [B, H, N, size].
        mass: float32 [B, H, N].
        free: bool [B, H, N], the rows that may merge.
        shared: whether the heads count together.
    """
    squares = mx.sum(vectors * vectors, axis=3)
    rows = vectors.shape[2]
    costs, slots, together = [], [], max(16, _PAIRS // rows)
    for start in range(0, rows, together):
        block, later = slice(start, start + together), slice(start, None)
        products = vectors[:, :, block] @ vectors[:, :, later].swapaxes(2, 3)
        apart = squares[:, :, block, None] + squares[:, :, None, later] - 2 * products
        one, other = mass[:, :, block, None], mass[:, :, None, later]
        cost = mx.sqrt(one * other / (one + other)) * mx.maximum(apart, 0)
        if shared:
            cost = mx.broadcast_to(mx.mean(cost, axis=1, keepdims=True), cost.shape)
        first = mx.arange(cost.shape[2])[:, None]
        pair = (mx.arange(cost.shape[3]) > first) & free[:, :, block, None]
        cost = mx.where(pair & free[:, :, None, later], cost, mx.inf)
        costs.append(mx.min(cost, axis=3))
        slots.append(mx.argmin(cost, axis=3) + start)
    return mx.concatenate(costs, axis=2), mx.concatenate(slots, axis=2)


def others(kept: mx.array, rows: int) -> mx.array:
    """The slots below ``rows`` that are not ``kept`` [B, H, K]: uint32 [B, H, rows - K]."""
    return mx.sort(marked(kept, rows), axis=2)[:, :, : rows - kept.shape[2]]


def targets(going: mx.array, costs: mx.array, slots: mx.array) -> mx.array:
    """Where the rows ``going``, uint32 [B, H, r], merge into: slots that stay, [B, H, r].

    A row whose partner goes too follows it; one without a partner is its own target.
    """
    rows, count = costs.shape[2], going.shape[2]
    stay = mx.broadcast_to(mx.arange(rows, dtype=mx.uint32), costs.shape)
    wanted = gathered(mx.where(costs == mx.inf, stay, slots), going)
    follow = mx.put_along_axis(stay, going, wanted, axis=2)
    for _ in range(count.bit_length()):
        follow = gathered(follow, follow)
    return gathered(follow, going)


def merged(
    into: mx.array, going: mx.array, same: mx.array, mass: tuple[mx.array, mx.array]
) -> mx.array:
    """Means weighted by mass: of each row ``into`` and of those that go there, float32.

    Args:
        into: rows [B, H, r, size] at the targets.
        going: rows [B, H, r, size] that go.
        same: float32 [B, H, r, r], 1 where a row goes to this target.
        mass: of both, [B, H, r].
    """
    there, here = (part[..., None] for part in mass)
    return (there * into + same @ (here * going)) / (there + same @ here)


class Mergers(NamedTuple):
    """What becomes of rows: slots that stay, uint32 [B, H, keep], and the rows that change, r each.

    ``into`` are their slots, uint32 [B, H, r], the same one more than once where several rows go
    there; then keys, values, ``ln n`` and positions there.
    """

    kept: mx.array
    into: mx.array
    keys: mx.array
    values: mx.array
    bias: mx.array
    positions: mx.array


def mergers(
    keys: mx.array,
    values: mx.array,
    bias: mx.array,
    positions: mx.array,
    *,
    keep: int,
    sink_size: int,
    recent_start: PerSequence,
    shared: bool = False,
) -> Mergers:
    """Merge all but ``keep`` rows of each head into others: the definition. A back end may bring
    its own.

    Args:
        keys: [B, H, N, D].
        values: [B, H, N, Dv].
        bias: ``ln n`` of the rows that each stands for, float32 [B, H, N]; NaN: the row goes first,
            as it is, and none goes there.
        positions: int32 [B, H, N].
        keep: rows that stay, at least 1 and fewer than N.
        sink_size: the first positions, which stay as they are.
        recent_start: the first position of the recent range, which does too.
        shared: whether all heads merge the same slots.
    """
    operations = backends.resolve()
    leaves = mx.isnan(bias)
    counts = mx.where(leaves, 1, mx.exp(bias))
    mass = masses(keys, counts)
    free = (positions >= sink_size) & (positions < beside_rows(recent_start)) & ~leaves
    costs, slots = partners(features(keys, values), mass, free, shared)
    ranks = mx.where(leaves, mx.nan, costs)
    kept = operations.keep_indices(
        ranks, positions, keep=keep, sink_size=sink_size, recent_start=recent_start
    )
    going = others(kept, positions.shape[2])
    into = targets(going, costs, slots)
    meets = (into[..., None] == into[..., None, :]) & (into != going)[..., None, :]
    same = meets.astype(mx.float32)
    weights = gathered(mass, into), gathered(mass, going)
    new_keys, new_values = (
        merged(gathered(rows, into), gathered(rows, going), same, weights).astype(rows.dtype)
        for rows in (keys, values)
    )
    added = (same @ gathered(counts, going)[..., None]).squeeze(-1)
    behind = mx.array(2**31 - 1, mx.int32)
    gone = mx.where(meets, gathered(positions, going)[..., None, :], behind)
    earliest = mx.minimum(gathered(positions, into), mx.min(gone, axis=3))
    ln = mx.log(gathered(counts, into) + added)
    return Mergers(kept, into, new_keys, new_values, ln, earliest)
