"""Run a model over one sequence with given caches, and with our attention if they need it."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_h2o.evaluation.reading import forced, read
from mlx_h2o.lm.routing import routing_for


def in_parts(model: Any, caches: list[Any], tokens: Sequence[int], *sizes: int) -> mx.array:
    """The logits [1, L, V] of tokens that are read in parts of these sizes, then one by one."""
    ends = *accumulate(sizes, initial=0), *range(sum(sizes) + 1, len(tokens) + 1)
    found = []
    for start, end in pairwise(ends):
        found.append(model(mx.array(tokens[start:end])[None], cache=caches))
        mx.eval(found[-1], [cache.state for cache in caches])
    return mx.concatenate(found, axis=1)


def prefill(model: Any, caches: list[Any], tokens: Sequence[int], *, chunk: int = 128) -> mx.array:
    """The last logits [V], after tokens that are read in chunks."""
    with routing_for(model, caches):
        return read(model, caches, mx.array([tokens]), chunk)[0]


def losses(
    model: Any, caches: list[Any], tokens: Sequence[int], *, first: int, **how: Any
) -> NDArray[np.float64]:
    """Nats of each token from `first` on, with the options of `forced`."""
    with routing_for(model, caches):
        found = forced(model, caches, mx.array([tokens]), first=first, **how)
    return np.array(found.losses[0]).astype(np.float64)
