"""Eviction for programs that generate with mlx_lm and make no caches themselves."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from mlx.nn.layers.base import Module

from .prompt_cache import make_prompt_cache
from .routing import routing_for


@contextlib.contextmanager
def evicting(model: Module, **settings: Any) -> Iterator[None]:
    """Within the context, mlx_lm's own ``make_prompt_cache(model)`` returns evicting caches.

    Nothing of the model's code is replaced, and other models are as they were.

    Args:
        model: an mlx_lm model.
        settings: of :func:`mlx_h2o.make_prompt_cache`.

    Raises:
        ValueError: as that function does, also where such a context is open for the model.
    """
    with made_by(model, make_prompt_cache(model, **settings)):
        yield


@contextlib.contextmanager
def made_by(model: Any, caches: list[Any]) -> Iterator[None]:
    """Within the context, copies of these caches are what the model makes."""
    with routing_for(model, caches):
        # An attribute of this one model, which shadows its class's.
        object.__setattr__(model, "make_cache", lambda: copy.deepcopy(caches))
        try:
            yield
        finally:
            object.__delattr__(model, "make_cache")
