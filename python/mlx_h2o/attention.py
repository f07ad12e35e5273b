"""Attention for a model whose cache may be ours: the output, and the scores to the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from . import composed, fast, handed_out, validate
from .bounded import BoundedRows
from .ema import MAX_QUERIES

__all__ = ["Call", "attend"]

_DECODE_QUERIES = 8
"""Up to here the kernels return output and scores together."""

_PARAMETERS = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")


@dataclass(frozen=True)
class Call:
    """A call of mlx_lm's attention function, and the cache of ours whose rows it reads."""

    owner: BoundedRows
    arguments: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """None where no cache of ours is concerned.

        The keys tell whose rows they are; the cache argument only where they do not, since some
        models pass None, another layer's cache or a list of caches.
        """
        arguments = dict(zip(_PARAMETERS, args, strict=False)) | kwargs
        owner = handed_out.owner_of(arguments.get("keys"))
        if owner is None and isinstance(arguments.get("cache"), BoundedRows):
            owner = arguments["cache"]
        return None if owner is None else cls(owner, arguments)


def attend(call: Call, original: Callable[[], mx.array]) -> mx.array:
    """The output of attention, to which the scores of the cache are tied.

    Up to 8 queries the fast operation returns both. A longer chunk takes its output from
    ``original``, the same call of mlx_lm's own attention, and the scores of its last 128 queries
    beside it, so that no matrix of all queries by all rows is made.
    """
    cache, arguments = call.owner, call.arguments
    if not cache.policy.needs_scores:
        return original()
    queries, keys, values = _same_dtype(arguments)
    scale, mask = arguments["scale"], arguments.get("mask")
    length = queries.shape[2]
    if length <= _DECODE_QUERIES:
        out, scores = fast.scaled_dot_product_attention_with_scores(
            queries, keys, values, scale=scale, mask=mask, sinks=arguments.get("sinks")
        )
    else:
        out = original()
        last = queries[:, :, -MAX_QUERIES:]
        scores = _scores(last, keys, values, scale, _last_rows(mask, length))
    cache.update_scores(scores, masked=mask is not None)
    # mlx_lm evaluates outputs only: untied, the scores of every step would wait, graph and all.
    tied: mx.array = mx.depends(out, [cast(mx.array, cache.scores)])
    return tied


def _same_dtype(arguments: dict[str, Any]) -> list[mx.array]:
    """Queries, keys and values, promoted to one dtype as MLX's own attention does."""
    arrays: list[mx.array] = [arguments[name] for name in _PARAMETERS[:3]]
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) == 1:
        return arrays
    common = mx.result_type(*arrays)
    return [array.astype(common) for array in arrays]


def _last_rows(mask: Any, length: int) -> Any:
    """The part of a mask that concerns the last queries; "causal" fits as it is."""
    per_query = isinstance(mask, mx.array) and mask.ndim > 1 and mask.shape[-2] == length
    return mask[..., -MAX_QUERIES:, :] if per_query else mask


def _scores(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array:
    """Scores alone: the composed back end is lazy, so its output is never computed."""
    request = validate.attention_request(queries, keys, values, scale=scale, mask=mask)
    scores = composed.attention(request)[1]
    return cast(mx.array, scores)  # None only where the request asks for none
