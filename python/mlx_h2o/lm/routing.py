"""Scores for the caches, out of mlx_lm's own models, while a context is open.

Every mlx_lm model calls ``scaled_dot_product_attention(queries, keys, values, cache, ...)``, the
one place where queries and cache meet, by a name that its module bound at import. Within
:func:`routing` that name is replaced in the modules of a model; when the last context closes,
it is put back.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, cast

import mlx.core as mx
import mlx_lm.models.base
from mlx.nn.layers.base import Module

from .replaced import NAME, namespaces_of, replaced
from .scored_attention import scored_attention


@contextlib.contextmanager
def routing(model: Module | None = None) -> Iterator[None]:
    """Within the context, attention gives its scores to the :class:`H2OKVCache` that it reads.

    Other caches are served by mlx_lm's own attention, so contexts may stay open, nest, and be
    used from several threads. Closing the last one restores mlx_lm.

    Args:
        model: the model to route, custom model files included; None for every loaded model
            module of mlx_lm.

    Raises:
        ValueError: the model does not call mlx_lm's attention anywhere.
    """
    namespaces = _callers(model) if model is not None else _naming(namespaces_of("mlx_lm.models."))
    if not namespaces:
        raise ValueError(
            f"[routing] {model_name(model)} does not call mlx_lm's attention function, so its "
            "scores cannot be had: expected another model, or a policy that needs none."
        )
    del model  # a context that stays open does not keep the model
    with replaced(namespaces, _routed):
        yield


def routing_for(model: Module, caches: Sequence[Any]) -> AbstractContextManager[None]:
    """:func:`routing` where caches need it, or are served better and the model allows it.

    Args:
        model: the model.
        caches: evicting caches of it, and no others.
    """
    if namespaces := _callers(model):
        return replaced(namespaces, _routed)
    return routing(model) if any(cache.needs_routing for cache in caches) else nullcontext()


def model_name(model: Module | None) -> str:
    """What error messages call a model: its mlx_lm model type where it has one."""
    if model is None:
        return "mlx_lm"
    args = getattr(model, "args", None)
    found = getattr(model, "model_type", None) or getattr(args, "model_type", None)
    return str(found or type(model).__module__.rpartition(".")[2])


def int_setting(model: Any, name: str) -> int | None:
    """A number among the settings of a model, or of its text part, if it has one of this name."""
    args = getattr(model, "args", None)
    for settings in (args, getattr(args, "text_config", None)):
        of = settings.get if isinstance(settings, dict) else functools.partial(getattr, settings)
        found = of(name, None)
        if isinstance(found, int):
            return found
    return None


def calls_attention(model: Module) -> bool:
    """Whether a model calls mlx_lm's attention function anywhere, so that it can be routed."""
    return bool(_callers(model))


def _callers(model: Module) -> list[dict[str, Any]]:
    """The namespaces that name the function, of the modules whose code this model runs."""
    classes = {base for module in cast(Any, model).modules() for base in type(module).__mro__}
    members = (one for cls in classes for one in list(vars(cls).values()))
    functions = (inspect.unwrap(getattr(one, "__func__", one)) for one in members)
    return _naming(one.__globals__ for one in functions if isinstance(one, FunctionType))


def _naming(namespaces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that name the function, and the module that defines it where one names that."""
    found: dict[int, dict[str, Any]] = {}
    for namespace in {id(one): one for one in namespaces}.values():
        if callable(namespace.get(NAME)):
            found[id(namespace)] = namespace
        if any(value is mlx_lm.models.base for value in list(namespace.values())):
            found[id(vars(mlx_lm.models.base))] = vars(mlx_lm.models.base)
    return list(found.values())


def _routed(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Attention that serves our caches, and leaves all others to ``original``."""

    @functools.wraps(original)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> mx.array:
        stock = functools.partial(original, *args, **kwargs)
        return scored_attention(stock, *args, **kwargs)

    return scaled_dot_product_attention
