"""The importance of rows, one value per (sequence, KV head, row): the moving average of their
scores, or the mass of their weights.

All in float32. ``a`` is the decay; ``1 - a`` is computed in double precision, then rounded once.
Other languages repeat the operations of ``accumulate_scores`` with one query in the same order.
"""

import mlx.core as mx

MAX_QUERIES = 128
"""Only this many last queries of a chunk are scored; at a = 0.95 older ones weigh 0.14 %."""

_START, _NOTHING = mx.array([0]), mx.array(0.0)


def accumulate_scores(
    importance: mx.array,
    scores: mx.array,
    *,
    decay: float,
    masked: bool = True,
) -> mx.array:
    """The importance after these scores [B, Hq, L, N], as ``fast.accumulate_scores`` defines it.

    O(B * Hq * L * N) time and memory, so L should be at most MAX_QUERIES.
    """
    mean, unmasked = _group_mean(scores, importance.shape[1], masked)
    update = _one_query if scores.shape[2] == 1 else _many_queries
    return update(importance, mean, unmasked, decay)


def _group_mean(scores: mx.array, heads: int, masked: bool) -> tuple[mx.array, mx.array | None]:
    """Mean over the unmasked query heads of each group, and which pairs have any: [B, H, L, N], or
    [B, H, N] for one query."""
    batch, query_heads, length, rows = scores.shape
    group = query_heads // heads
    pairs = (length, rows) if length > 1 else (rows,)
    grouped = scores.reshape(batch, heads, group, *pairs)
    if not masked:
        return mx.sum(grouped, axis=2) / group, None
    seen = grouped > -mx.inf
    count = mx.sum(seen, axis=2)
    mean = mx.sum(mx.where(seen, grouped, 0.0), axis=2) / mx.maximum(count, 1)
    return mean, count > 0


def _one_query(
    importance: mx.array, mean: mx.array, unmasked: mx.array | None, decay: float
) -> mx.array:
    new = mx.abs(mean)
    result = mx.where(mx.isnan(importance), new, decay * importance + (1 - decay) * new)
    return result if unmasked is None else mx.where(unmasked, result, importance)


def _many_queries(
    importance: mx.array, mean: mx.array, unmasked: mx.array | None, decay: float
) -> mx.array:
    """The recurrence unrolled: query i of a row weighs a^(unmasked queries after i)."""
    if unmasked is None:
        unmasked = mx.ones(mean.shape, mx.bool_)
    so_far = mx.cumsum(unmasked.astype(mx.int32), axis=2)
    count = so_far[:, :, -1]
    unscored = mx.isnan(importance)
    # (1 - a) for every query but the one that sets the value of an unscored row.
    sets = mx.logical_and(mx.expand_dims(unscored, 2), so_far == 1)
    share = mx.where(sets, 1.0, 1 - decay)
    weight = mx.power(decay, (mx.expand_dims(count, 2) - so_far).astype(mx.float32))
    added = mx.sum(mx.where(unmasked, weight * share * mx.abs(mean), 0.0), axis=2)
    kept = mx.power(decay, count.astype(mx.float32)) * importance
    result = mx.where(unscored, added, kept + added)
    return mx.where(count > 0, result, importance)


def add_average(importance: mx.array, scores: mx.array, decay: float, masked: bool) -> mx.array:
    """``accumulate_scores`` for an ``importance`` that may have more rows; these do not change."""
    part = importance[:, :, : scores.shape[3]]
    part = accumulate_scores(part, scores, decay=decay, masked=masked)
    return mx.slice_update(importance, part, _START, [2])


def add_mass(importance: mx.array, weights: mx.array) -> mx.array:
    """``importance`` [B, H, N] plus the weights [B, H, queries, N] that all queries of a KV head
    give to each row; NaN, for a row that is not scored yet, counts as 0.

    ``importance`` may have more rows; these do not change.
    """
    part = mx.split(importance, [weights.shape[3]], 2)[0]  # a slice takes longer
    part = mx.where(mx.isnan(part), _NOTHING, part) + weights.sum(2)
    return mx.slice_update(importance, part, _START, [2])
