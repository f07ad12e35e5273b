"""How a policy accumulates scores: those that attention returned, or those of a chunk."""

from typing import Any

import mlx.core as mx

from ..operations import composed
from ..operations.backends import resolve
from ..operations.composed import accumulating, prefill
from ..operations.requests import attention_request, last_queries
from .base import Policy


def seen(
    policy: Policy, scores: mx.array, lse: mx.array | None, sinks: mx.array | None = None
) -> mx.array:
    """What ``accumulate`` takes: the scores, or their weights if the policy needs weights.

    Without ``lse``, the softmax is over these scores and ``sinks``. Raises ValueError for an
    ``lse`` of another shape.
    """
    if not policy.needs_weights:
        return scores
    if lse is None:
        return composed.weights(scores, sinks)
    if lse.shape != scores.shape[:3]:
        raise ValueError(
            f"[H2OKVCache.update_scores] lse has shape {lse.shape}, expected [B, Hq, L] = "
            f"{scores.shape[:3]} as the scores."
        )
    return composed.weights_of(scores, lse)


def accumulated(
    policy: Policy,
    importance: mx.array,
    given: mx.array,
    positions: mx.array | None,
    *,
    masked: bool = True,
) -> mx.array:
    """The importance [B, H, N] after the scores or weights ``given`` [B, Hq, L, N]."""
    if policy.chunk_queries is not None:
        given = given[:, :, -policy.chunk_queries :]
    return policy.accumulate(importance, given, positions=positions, masked=masked)


def chunk_seen(
    policy: Policy,
    importance: mx.array,
    positions: mx.array | None,
    queries: mx.array,
    keys: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    row_bias: mx.array | None,
) -> mx.array:
    """The importance after a chunk whose attention returned no scores.

    In blocks of keys or queries where the policy allows it, so that the scores are never in memory
    all at once.
    """
    given: Any = {"scale": scale, "mask": mask, "row_bias": row_bias, "bias_masks": False}
    request, operations = attention_request(queries, keys, keys, **given), resolve()
    if policy.decay is not None and keys.shape[1] == importance.shape[1]:
        last = last_queries(request, accumulating.MAX_QUERIES)
        return operations.prefill_scores(last, importance, policy.decay)
    if policy.chunk_queries is None:
        request.sinks = sinks
        scores = mx.expand_dims(operations.prefill_scores(request, None, None), 2)
    else:
        scores = prefill.last_scores(queries, keys, queries=policy.chunk_queries, **given)
        scores = seen(policy, scores, None, sinks)
    return policy.accumulate(importance, scores, positions=positions, masked=mask is not None)
