"""What share of the pairs of query and row sparse V leaves out, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .. import fast
from ..caches.cache import H2OKVCache
from ..lm.prompt_cache import evicting_caches
from .reading import read

__all__ = ["STEPS", "skipped"]

STEPS = 16
"""Tokens at the end of a text that are read one by one, each over all rows before it."""


def skipped(model: Any, caches: list[Any], tokens: mx.array, chunk: int) -> dict[str, list[float]]:
    """By layer, and for each of the texts tokens [B, T]: the share of its pairs whose weight is
    below ``sparse_v``, averaged over the query heads and the last tokens.

    Empty where no cache skips any, as in those of other kinds.

    Raises ValueError for a model to which rows go unpacked, so that it reads all of them.
    """
    configs = ((one, one.config) for one in evicting_caches(caches))
    served = [one for one, config in configs if config.sparse_v and not config.mixed]
    if not served:
        return {}
    shares: list[list[mx.array]] = [[] for _ in served]
    last = tokens.shape[1] - STEPS
    read(model, caches, tokens[:, :last], chunk)
    for cache, found in zip(served, shares, strict=True):
        vars(cache)["attend"] = _noting(cache, found)
    read(model, caches, tokens[:, last:], 1)
    for cache in served:
        del vars(cache)["attend"]
    if not all(shares):
        raise ValueError("the model's attention takes rows unpacked, of which none is skipped")
    means: list[Any] = [mx.concatenate(found, axis=1).mean(axis=1).tolist() for found in shares]
    return {f"layer {layer}": [float(one) for one in mean] for layer, mean in enumerate(means)}


def _noting(cache: H2OKVCache, found: list[mx.array]) -> Callable[..., mx.array]:
    """The attention of a cache, which adds to ``found`` what it skips, [B, 1]."""
    attend = cache.attend
    attention: Any = fast.scaled_dot_product_attention_quantized_with_scores

    def noted(queries: mx.array, keys: Any, values: Any, **given: Any) -> mx.array:
        if isinstance(values, tuple):
            bias, rows = cache.row_bias, values[0].shape[2]
            *_, share = attention(
                cache.as_asked(queries), *_parts(keys), *_parts(values), **given,
                **cache.attention_settings,
                row_bias=None if bias is None else bias[:, :, :rows], return_skipped=True,
            )  # fmt: skip
            found.append(share.mean(axis=1))
            mx.eval(found[-1])
        return attend(queries, keys, values, **given)

    return noted


def _parts(rows: mx.array | tuple[mx.array, ...]) -> tuple[mx.array | None, ...]:
    """Words, scales or norms, and biases: of rows of codes, and of those as they come, some."""
    parts = rows if isinstance(rows, tuple) else (rows,)
    return (*parts, None, None)[:3]
