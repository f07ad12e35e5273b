"""Attention for a model whose cache may be ours: the output, and the scores to the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ..caches import handed_out
from ..caches.bounded import BoundedRows
from ..operations import validate
from ..operations.backends import named, resolve
from ..operations.validate_quantized import QUANTIZED_ATTENTION, quantized_attention_request
from ..stores.storage import DECODE_QUERIES, Packed

__all__ = ["Call", "attend"]

_PARAMETERS = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")


class Call(NamedTuple):
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
        if owner is None:
            given = arguments.get("cache")
            given = getattr(given, "leader", given)  # of the caches of an indexed layer
            owner = given if isinstance(given, BoundedRows) else None
        return None if owner is None else cls(owner, arguments)


def attend(call: Call, original: Callable[[], mx.array]) -> mx.array:
    """The output of attention, to which the scores of the cache are tied.

    Up to 8 queries the fast operation returns both. A longer chunk takes its output from
    ``original``, the same call of mlx_lm's own attention, and the scores of its last 128 queries
    beside it, so that no matrix of all queries by all rows is made.
    """
    cache, arguments = call.owner, call.arguments
    length = arguments["queries"].shape[2]
    if not cache.policy.needs_scores:
        if length > DECODE_QUERIES:
            return original()
        if cache.in_segments or cache.ranks_keys(arguments["queries"], arguments["keys"]):
            return _decoded(cache, arguments)
        return _output(arguments, original, cache.attention_settings)
    if length <= DECODE_QUERIES:
        return _decoded(cache, arguments)
    queries, keys, _ = _same_dtype(arguments)
    mask, sinks = arguments.get("mask"), arguments.get("sinks")
    out = original()
    cache.score_chunk(queries, keys, scale=arguments["scale"], mask=mask, sinks=sinks)
    # mlx_lm evaluates outputs only: untied, the scores of every step would wait, graph and all.
    tied: mx.array = mx.depends(out, [cast(mx.array, cache.scores)])
    return tied


def _decoded(cache: BoundedRows, arguments: dict[str, Any]) -> mx.array:
    queries, keys, values = _same_dtype(arguments)
    mask, sinks = arguments.get("mask"), arguments.get("sinks")
    return cache.attend(queries, keys, values, scale=arguments["scale"], mask=mask, sinks=sinks)


def _output(
    arguments: dict[str, Any], original: Callable[[], mx.array], settings: dict[str, Any]
) -> mx.array:
    """Attention without scores: native where that serves, which MLX's own on a CPU trails.

    Packed rows are always ours: mlx_lm's attention over them is not fused and takes no sinks.
    """
    queries, keys, values = _same_dtype(arguments)
    if isinstance(keys, tuple):
        return _packed_output(queries, keys, values, arguments, settings)
    if named() not in (None, "native"):
        return original()
    request = validate.attention_request(
        queries,
        keys,
        values,
        scale=arguments["scale"],
        mask=arguments.get("mask"),
        sinks=arguments.get("sinks"),
        return_scores=False,
    )
    backend = resolve().backend_for(request, validate.ATTENTION)
    return backend.attention(request).out if backend.name == "native" else original()


def _packed_output(
    queries: mx.array,
    keys: Packed,
    values: Packed,
    arguments: dict[str, Any],
    settings: dict[str, Any],
) -> mx.array:
    request = quantized_attention_request(
        queries,
        keys,
        values,
        scale=arguments["scale"],
        mask=arguments.get("mask"),
        sinks=arguments.get("sinks"),
        return_scores=False,
        **settings,
    )
    return resolve().serve_attention(request, QUANTIZED_ATTENTION).out


def _same_dtype(arguments: dict[str, Any]) -> list[Any]:
    """Queries, keys and values, promoted to one dtype as MLX's own attention does.

    Packed rows stay as they are.
    """
    arrays: list[Any] = [arguments[name] for name in _PARAMETERS[:3]]
    if isinstance(arrays[1], tuple) or arrays[0].dtype == arrays[1].dtype == arrays[2].dtype:
        return arrays
    common = mx.result_type(*arrays)
    return [array.astype(common) for array in arrays]
