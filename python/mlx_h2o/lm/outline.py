"""Count the bytes of caches without computing anything.

One token in a lazy graph that is never evaluated shows which arrays each layer keeps of it. Bytes
follow from their shapes, for any model and any caches, without a formula.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache

from .probing import Watched
from .routing import args_of, evicting_caches, parts_of, routing_for
from .scored_attention import scored_attention

FAR = 1 << 20
"""Tokens after which windows are full."""


class Outline:
    """Stands in for a model to make its caches and count their bytes: it feeds them rows of the
    model's shapes, and computes nothing.

    Args:
        model: an mlx_lm model; none of its weights is evaluated.
        narrow: count rows of 32 bits as 16: a CPU computes in float32 what is float16 elsewhere.

    Attributes:
        model: the model.
        kept: for each cache, the keys and values of a token and the queries that attend to them;
            or its other arrays; or a list of the same for its parts.
        heads: the KV heads of each plain KVCache; 0 if its layer reads another layer's rows.
    """

    def __init__(self, model: Any, narrow: bool = False) -> None:
        self.model = model
        self.args, self.model_type = args_of(model), getattr(model, "model_type", None)
        self.parameters, self.modules = model.parameters, functools.cache(model.modules)
        caches = self.make_cache()
        growing = [one for one in parts_of(caches) if type(one) is mlx_lm_cache.KVCache]
        for one in growing:
            one.__class__ = Watched
        with routing_for(cast(Any, self), caches):
            model(mx.zeros((1, 1), mx.int32), cache=caches)
        self.kept = [_kept(cache, narrow) for cache in caches]
        self.heads = [0 if one.keys is None else one.keys.shape[1] for one in growing]

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return sum(array.nbytes for _, array in cast(Any, tree_flatten)(self.parameters()))

    def make_cache(self) -> list[Any]:
        """mlx_lm's own caches."""
        return mlx_lm_cache.make_prompt_cache(self.model)

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> None:
        """Feed the caches this many tokens of one sequence."""
        pairs = zip(cache, self.kept, strict=True)
        for one, kept in {id(pair[0]): pair for pair in pairs}.values():
            _feed(one, kept, tokens.shape[1])

    def fed(self, caches: list[Any], *counts: int) -> Iterator[list[Any]]:
        """Feed the caches chunks of these many tokens, and yield them after each; the first of
        several equal layers stands for all.

        Raises ValueError if they need scores and the model shows none.
        """
        first: dict[Any, Any] = {}
        caches = [*map(first.setdefault, map(_kind, caches, self.kept), caches)]
        with routing_for(cast(Any, self), caches):
            for count in counts:
                self(mx.zeros((1, count), mx.int32), caches)
                yield caches


def total_bytes(caches: Sequence[Any]) -> int:
    """Bytes of all caches together."""
    return sum(int(one.nbytes) for one in caches)


def _kept(cache: Any, narrow: bool) -> Any:
    if isinstance(cache, mlx_lm_cache.CacheList):
        return [_kept(part, narrow) for part in cache.caches]
    if isinstance(cache, mlx_lm_cache.ArraysCache):
        return cache.state
    if not hasattr(cache, "keys"):
        said = f"the model makes a {type(cache).__name__}, expected caches of mlx_lm.models.cache"
        raise ValueError(f"[Outline] {said}: the bytes of others cannot be counted.")
    wide = narrow and cache.keys is not None and cache.keys.dtype == mx.float32
    queries = getattr(cache, "queries", None)
    kept = cache.keys, cache.values, cache.keys if queries is None else queries
    return [one.astype(mx.float16) for one in kept] if wide else kept


def _kind(cache: Any, kept: Any) -> Any:
    """A key that is equal for caches that take the same bytes for the same tokens."""
    plain, ours = type(cache) is mlx_lm_cache.KVCache, list(evicting_caches([cache]))
    if isinstance(cache, mlx_lm_cache.CacheList) or not (plain or ours):
        return id(cache)
    heads = [len(group) for group in getattr(cache, "heads", ())]
    shapes = [one if one is None else (one.shape, one.dtype) for one in kept]
    return (*heads, *shapes, *(one.config for one in ours))


def _feed(cache: Any, kept: Any, tokens: int) -> None:
    if isinstance(cache, mlx_lm_cache.CacheList):
        for part, own in zip(cache.caches, kept, strict=True):
            _feed(part, own, tokens)
    elif isinstance(cache, mlx_lm_cache.ArraysCache):
        cache.state = kept
    elif kept[0] is not None:  # or the layer reads another layer's cache
        if hasattr(cache, "maybe_trim_front"):
            cache.maybe_trim_front()
        rows = [mx.zeros((1, one.shape[1], tokens, one.shape[3]), one.dtype) for one in kept]
        keys, values = cache.update_and_fetch(*rows[:2])
        if ours := list(evicting_caches([cache])):
            if isinstance(keys, tuple) and ours[0].config.kv_handed == "latents":
                values = keys
            # Scores have the same shape for any number of queries; few keep the graph short.
            asked = rows[2][:, :, -64:]
            scored_attention(lambda asked, *_, **__: asked, asked, keys, values, cache=cache)
