"""Attention that returns its output, and passes its scores to the cache that wants them."""

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

from .. import fast
from ..caches import handed_out
from ..caches.attention import DECODE_QUERIES
from ..caches.cache import H2OKVCache
from ..caches.heads import HeadGroups
from ..operations.composed import prefill

_EARLY = "model computes with the keys before attention reads them: expected"


def scored_attention(
    attention: Callable[..., mx.array], queries: mx.array, keys: Any, values: Any,
    cache: Any = None, scale: float = 1.0,
    mask: mx.array | str | handed_out.EachLayersMask | None = None,
    sinks: mx.array | None = None, **more: Any,
) -> mx.array | None:  # fmt: skip
    """mlx_lm's attention function, which passes its scores to the cache whose rows it reads; None
    if that cache wants none, and mlx_lm's own function serves it.

    The keys tell which cache owns the rows. The cache argument counts only if they do not, since
    some models pass None, another layer's cache or a list of caches. Any cache with
    ``update_scores`` gets scores; policies that need none do without.

    For up to 8 queries, the fast operation returns output and scores. A longer chunk takes its
    output from ``attention``, mlx_lm's own, and computes the scores of its last 128 queries
    separately, so that no matrix of all queries by all rows is made.
    """

    def stock() -> mx.array:
        given = more if sinks is None else {**more, "sinks": sinks}
        return attention(queries, keys, values, cache=cache, scale=scale, mask=mask, **given)

    owner: H2OKVCache | HeadGroups | None = handed_out.owner_of(keys)[0]
    if isinstance(owner, HeadGroups):
        return owner.attended_by(
            lambda one, rows, asked, mask, sinks: cast(
                mx.array, scored_attention(attention, asked, *rows, one, scale, mask, sinks)
            ),
            queries, keys, mask, sinks,
        )  # fmt: skip
    if owner is None:
        if isinstance(cache, HeadGroups):
            said = f"{cache.caches[0].name or 'a layer'} and others have unequal budgets, and their"
            raise ValueError(f"[mlx_h2o] {said} {_EARLY} layers='equal'.")
        if isinstance(cache, H2OKVCache):
            owner = cache
            if shared := owner.prefix_rows:
                said = f"{owner.name or 'a cache'} shares its first {shared} rows, and its"
                raise ValueError(f"[mlx_h2o] {said} {_EARLY} share_prefix=False.")
        elif hasattr(cache, "attend_for_probe"):
            given = {"scale": scale, "mask": mask, "sinks": sinks}
            return cast(mx.array, cache.attend_for_probe(attention, queries, keys, values, **given))
        elif not hasattr(cache, "update_scores"):
            return None
    packed = isinstance(keys, tuple) or isinstance(values, tuple)
    if not packed and not queries.dtype == keys.dtype == values.dtype:
        # Promoted to one dtype, as MLX's own attention does.
        common = mx.result_type(queries, keys, values)
        queries, keys, values = (rows.astype(common) for rows in (queries, keys, values))
    elif packed and not isinstance(keys, tuple):  # only values are packed
        queries = queries.astype(keys.dtype)
    if isinstance(mask, handed_out.EachLayersMask):
        mask = None if owner is None else owner.mask_of_update()
    if owner is None:
        return _foreign(cache, stock, queries, keys, values, sinks, scale=scale, mask=mask)
    return owner.attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks, stock=stock)


def _foreign(
    cache: Any, stock: Callable[[], mx.array], queries: mx.array, keys: Any, values: Any,
    sinks: mx.array | None, **given: Any,
) -> mx.array:  # fmt: skip
    """Attention for another package's cache that asks for scores, float32 [B, Hq, L, N]."""
    if isinstance(keys, tuple):
        packing: Any = {"group_size": cache.group_size, "bits": cache.bits}
        keys, values = mx.dequantize(*keys, **packing), None
    if values is None or queries.shape[2] > DECODE_QUERIES:
        out, scores = stock(), prefill.last_scores(queries, keys, **given)
    else:
        out, scores = fast.scaled_dot_product_attention_with_scores(
            queries, keys, values, sinks=sinks, **given
        )
    cache.update_scores(scores)
    return out
