"""Get scores for the caches out of mlx_lm's own models, while a context is open.

Nearly every mlx_lm model calls ``scaled_dot_product_attention(queries, keys, values, cache, ...)``,
the one place where queries and cache meet, by a name that its module bound at import. Within
:func:`routing`, that name, and no other of mlx_lm, is replaced in the modules of a model; it is
restored exactly when the last context closes.

A context can end at any moment: an abandoned generator closes its context from the garbage
collector, in the middle of another call of the same thread. Ctrl-C can strike between any two
steps. So every step can safely run twice, and the end of the next context completes what is left.
"""

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm.models.base
from mlx.nn.layers.base import Module

from ..caches.cache import H2OKVCache
from ..errors import LARGEST, check_int
from .scored_attention import scored_attention

NAME = "scaled_dot_product_attention"
"""mlx_lm's attention function, as every module of a model calls it."""

Namespace = dict[str, Any]


def routing(model: Module | None = None) -> contextlib.AbstractContextManager[None]:
    """Within the context, attention passes its scores to the :class:`H2OKVCache` that it reads.

    Other caches are served by mlx_lm's own attention, so contexts may stay open, nest, and be
    used from several threads. When the last one closes, mlx_lm is restored.

    Args:
        model: the model to route, including custom model files; None for every loaded model
            module of mlx_lm.

    Raises:
        ValueError: not a model, or one that does not call mlx_lm's attention anywhere.
    """
    namespaces = _callers(model) if model is not None else _naming(_loaded("mlx_lm.models."))
    if not namespaces:
        why = "does not call mlx_lm's attention function, so its scores cannot be had"
        raise ValueError(f"[routing] {model_name(model)} {why}: expected a policy without scores.")
    return replaced(namespaces)


def routing_for(
    model: Module, caches: Sequence[Any], draft_model: Module | None = None
) -> contextlib.AbstractContextManager[None]:
    """:func:`routing` for the caches of both models, if evicting ones need it or the models allow
    it. mlx_lm's own caches leave mlx_lm as it is."""
    if all(type(one).__module__ == "mlx_lm.models.cache" for one in parts_of(caches)):
        return contextlib.nullcontext()
    models = [one for one in (model, draft_model) if one is not None]
    namespaces = [_callers(one) for one in models]
    if not all(namespaces) and any(one.needs_routing for one in evicting_caches(caches)):
        return routing(models[namespaces.index([])])  # which raises
    return replaced([*chain(*namespaces)])


def check_given(
    operation: str, model: Any, draft_model: Any = None, length: int | None = None
) -> None:
    """Raises ValueError unless these are models and a number of tokens."""
    for one in (model, model if draft_model is None else draft_model):
        if not hasattr(one, "modules"):
            said = f"found {one!r:.80}, expected a model, such as load returns."
            raise ValueError(f"[{operation}] {said}")
    if length is not None:
        check_int(operation, "length", length)


class _Context(list[Namespace]):
    """The namespaces that an open context needs replaced. Held weakly: an abandoned one goes."""


_lock = threading.RLock()
_open: dict[int, weakref.ref[_Context]] = {}
_changed: dict[int, Namespace] = {}


@contextlib.contextmanager
def replaced(namespaces: Sequence[Namespace]) -> Iterator[None]:
    """Within the context, mlx_lm's attention function is replaced by one that serves our caches, in
    each of these namespaces, all of which name it. Contexts are counted."""
    context = _Context(namespaces)
    try:
        with _lock:
            _open[id(context)] = weakref.ref(context)
            for namespace in namespaces:
                _changed[id(namespace)] = namespace
                if not hasattr(namespace[NAME], "replaces"):
                    namespace[NAME] = _routed(namespace[NAME])
        yield
    finally:
        with _lock:
            _open.pop(id(context), None)
            _put_back()


def _put_back() -> None:
    """Restore the function where no open context needs the replacement: also in modules that were
    imported meanwhile and bound the replacement, but not where other code has replaced it since."""
    others = [one() for one in _open.copy().values()]
    needed = [place.get(NAME) for one in others if one is not None for place in one]
    for namespace in (*_changed.copy().values(), *_loaded("mlx_lm.")):
        found: Any = namespace.get(NAME)
        if found not in needed:
            if hasattr(found, "replaces"):
                namespace[NAME] = found.replaces
            _changed.pop(id(namespace), None)


def _loaded(prefix: str) -> list[Namespace]:
    """The namespaces of loaded modules with this prefix; threads may import more meanwhile."""
    modules = [one for name, one in sys.modules.copy().items() if name.startswith(prefix)]
    return [vars(one) for one in modules if isinstance(one, ModuleType)]


def parts_of(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches, with their parts in place of those that contain others."""
    for cache in caches:
        yield from parts_of(cache.caches) if hasattr(cache, "caches") else [cache]


def held_tokens(caches: Sequence[Any]) -> list[int]:
    """How many tokens each cache has seen, of the caches that know it and are no batches."""
    seen = (getattr(one, "offset", None) for one in parts_of(caches))
    return [one for one in seen if isinstance(one, int)]


def evicting_caches(caches: Iterable[Any]) -> Iterator[H2OKVCache]:
    """The H2OKVCache among ``caches``, including those inside other caches."""
    return (one for one in parts_of(caches) if isinstance(one, H2OKVCache))


def bounds(caches: Sequence[Any]) -> list[tuple[int, int]]:
    """Of all bounded caches, ours and mlx_lm's: up to how many tokens each keeps all, and its most
    rows. KV heads with unequal budgets have equal ones at first (``rows_at``)."""
    stock = (getattr(one, n, None) for one in parts_of(caches) for n in ("max_size", "chunk_size"))
    found = [(size, size) for size in stock if size is not None]
    for own in (one.config for one in evicting_caches(caches)):
        if own.max_kv_size is not None:
            found.append((min(own.rows_at[0]) if own.rows_at else own.max_kv_size, own.max_kv_size))
    return found


def model_name(model: Any) -> str:
    """What error messages call a model: its mlx_lm model type if it has one."""
    found = getattr(model, "model_type", None) or getattr(args_of(model), "model_type", None)
    return str(found or type(model).__module__.rpartition(".")[2])


def args_of(model: Any) -> Any:
    """The settings of a model, by mlx_lm's names for them; a ``config.json`` is settings itself."""
    return getattr(model, "args", None) or getattr(model, "config", model)


def int_setting(model: Any, *names: str) -> int | None:
    """The first number in range of these names in the settings of a model, in a ``config.json``, or
    in their text part."""
    parts = (own := args_of(model), _of(own, "text_config"))
    numbers = (_of(settings, name) for name in names for settings in parts)
    return next((found for found in numbers if type(found) is int and 0 < found <= LARGEST), None)


def _of(settings: Any, name: str) -> Any:
    return settings.get(name) if isinstance(settings, dict) else getattr(settings, name, None)


def context_length(model: Any) -> int | None:
    """The context that the model was trained on, in tokens, if it, or its settings, say."""
    names = "max_position_embeddings", "model_max_length", "n_positions", "max_seq_len"
    return int_setting(model, *names)


def calls_attention(model: Module) -> bool:
    """Whether a model calls mlx_lm's attention function anywhere, so that it can be routed."""
    return bool(_callers(model))


def _callers(model: Module) -> list[Namespace]:
    """The namespaces of modules whose code this model runs, if they name the function."""
    check_given("routing", model)
    classes = {base for module in model.modules() for base in type(module).__mro__}
    members = (one for cls in classes for one in list(vars(cls).values()))
    functions = (inspect.unwrap(getattr(one, "__func__", one)) for one in members)
    return _naming(one.__globals__ for one in functions if isinstance(one, FunctionType))


def _naming(namespaces: Iterable[Namespace]) -> list[Namespace]:
    """The namespaces that name the function, and its own module if one of them names that."""
    found: dict[int, Namespace] = {}
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
        found = scored_attention(original, *args, **kwargs)
        return original(*args, **kwargs) if found is None else found

    scaled_dot_product_attention.replaces = original  # type: ignore[attr-defined]
    return scaled_dot_product_attention
