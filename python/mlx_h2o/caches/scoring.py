"""What a policy makes of the scores of one attention: of scores that are there, or of a chunk."""

from __future__ import annotations

import mlx.core as mx

from .. import fast
from ..operations import composed, prefill
from ..policies import Policy
from ..stores.storage import Storage

__all__ = ["after_chunk", "after_scores", "after_seen", "seen"]


def after_scores(
    policy: Policy,
    store: Storage,
    scores: mx.array,
    *,
    lse: mx.array | None = None,
    masked: bool = True,
) -> mx.array:
    """The importance of the stored rows, the scores taken in: float32 [B, H, N].

    Args:
        policy: makes it.
        store: of the rows.
        scores: float32 [B, Hq, L, N], logits, -inf where masked.
        lse: float32 [B, Hq, L], as attention returns it; None: of these scores alone.
        masked: False promises that no score is -inf.

    Raises:
        ValueError: ``lse`` of another shape.
    """
    return after_seen(policy, store, seen(policy, scores, lse), masked=masked)


def seen(
    policy: Policy, scores: mx.array, lse: mx.array | None, sinks: mx.array | None = None
) -> mx.array:
    """What ``accumulate`` takes of scores: themselves, or weights where the policy wants them.

    Where there is no ``lse``, weights are of these scores and ``sinks``.
    """
    if not policy.needs_weights:
        return scores
    return _shares(scores, sinks) if lse is None else _weights(scores, lse)


def after_seen(policy: Policy, store: Storage, seen: mx.array, *, masked: bool = True) -> mx.array:
    """The importance of the stored rows after what ``seen`` gave, [B, Hq, L, N]."""
    if policy.chunk_queries is not None:
        seen = seen[:, :, -policy.chunk_queries :]
    return policy.accumulate(store.importance, seen, positions=store.positions, masked=masked)


def after_chunk(
    policy: Policy,
    store: Storage,
    queries: mx.array,
    keys: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """The same of a chunk whose attention returned no scores.

    In blocks of keys or queries where the policy allows it, so that the scores are never in memory
    all at once.
    """
    if policy.decay is not None and keys.shape[1] == store.positions.shape[1]:
        return fast.prefill_scores(
            queries,
            keys,
            scale=scale,
            mask=mask,
            importance=store.importance,
            decay=policy.decay,
        )
    if policy.chunk_queries is None:
        mass = fast.prefill_scores(queries, keys, scale=scale, mask=mask, sinks=sinks, kind="mass")
        given = mx.expand_dims(mass, 2)
    else:
        count = policy.chunk_queries
        given = prefill.last_scores(queries, keys, scale=scale, mask=mask, queries=count)
        if policy.needs_weights:
            given = _shares(given, sinks)
    return policy.accumulate(
        store.importance, given, positions=store.positions, masked=mask is not None
    )


def _weights(scores: mx.array, lse: mx.array) -> mx.array:
    """``exp(scores - lse)``, 0 where a query sees nothing."""
    if lse.shape != scores.shape[:3]:
        raise ValueError(
            f"[H2OKVCache.update_scores] lse has shape {lse.shape}, expected [B, Hq, L] = "
            f"{scores.shape[:3]} as the scores."
        )
    lse = mx.expand_dims(lse, -1)
    return mx.where(lse == -mx.inf, 0.0, mx.exp(scores - lse))


def _shares(scores: mx.array, sinks: mx.array | None) -> mx.array:
    weights, total, _ = composed.softmax_parts(scores, sinks)
    return mx.where(total == 0, 0.0, weights / total)
