"""mlx_lm's own commands with caches that evict: their names for making caches, replaced.

Within the context ``make_prompt_cache`` of mlx_lm's generation and chat makes evicting caches, and
routes each model that it makes them for. Everything else is mlx_lm's.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..config import H2OConfig
from .budgets import Budgets
from .generate import load
from .prompt_cache import evicting_caches, fit_bytes, make_prompt_cache
from .replacements import PATCHES, always
from .routing import gains_by_routing, routing
from .upstream import NAMES, target


@contextmanager
def hosting(
    config: H2OConfig,
    budgets: Budgets | None = None,
    layers: str = "probe",
    sized: Mapping[str, Any] | None = None,
) -> Iterator[Host]:
    """Within the context mlx_lm's commands make caches of these settings, with ``budgets`` and
    ``layers`` as of :func:`mlx_h2o.make_prompt_cache`. With ``sized``, arguments of ``fit_bytes``,
    the settings of each model are those that fit, and those of a model and its draft model the ones
    with which both fit.

    ``load`` there knows the model "demo" too.
    """
    with ExitStack() as stack:
        host = Host(config, budgets, layers, sized, stack)
        targets = [
            target(module, name, wrap)
            for name, wrap in (("make_prompt_cache", host.making), ("load", always(load)))
            for module, names in NAMES.items()
            if name in names
        ]
        targets.append(target("generate", "trim_prompt_cache", _trimming))
        with PATCHES.replaced(targets):
            yield host


class Host:
    """Makes caches, and keeps each model routed that it made some for.

    Attributes:
        config: the settings.
        budgets: those of each layer, or None.
        layers: "probe" or "equal".
        sized: arguments of ``fit_bytes``, or None.
        model: the last model that caches were made for, while it lives.
    """

    def __init__(
        self,
        config: H2OConfig,
        budgets: Budgets | None,
        layers: str,
        sized: Mapping[str, Any] | None,
        stack: ExitStack,
    ) -> None:
        self.config = config
        self.budgets = budgets
        self.layers = layers
        self.sized = sized
        self._fitting: tuple[list[weakref.ref[Any]], H2OConfig] = [], config
        self.model: Callable[[], Any] = lambda: None
        self._stack = stack
        self._lock = threading.Lock()
        self._routed: list[weakref.ref[Any]] = []  # a strong one would keep unloaded models

    def caches(self, model: Any, draft_model: Any = None, length: int | None = None) -> list[Any]:
        """Caches of these settings, for so many tokens if that is known, and behind them those of a
        draft model."""
        self.fit(model, draft_model, length)
        return make_prompt_cache(
            model,
            self.config if self.sized is None else self._fitting[1],
            draft_model=draft_model,
            budgets=self.budgets,
            layers=self.layers,
            length=length,
        )

    def fit(self, model: Any, draft_model: Any = None, length: int | None = None) -> None:
        """Pick the settings with which the caches of these models fit together, and say so; unless
        they are known, as of one of two that fit already."""
        known, _ = self._fitting
        if self.sized is None or any(one() is model for one in known):
            return
        found = fit_bytes(
            model, draft_model=draft_model, layers=self.layers, length=length, **self.sized
        )
        print(f"KV cache: {found}", file=sys.stderr)
        models = [one for one in (model, draft_model) if one is not None]
        self._fitting = [weakref.ref(one) for one in models], found.config

    def making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(model: Any, max_kv_size: int | None = None) -> list[Any]:
            return self.made(model)

        return make

    def made(self, model: Any) -> list[Any]:
        """Caches of these settings for a model that is routed from now on, where it gains by it."""
        caches = self.caches(model)
        self.model = weakref.ref(model)
        self._route(model, caches)
        return caches

    def _route(self, model: Any, caches: Sequence[Any]) -> None:
        if not gains_by_routing(model, list(evicting_caches(caches))):
            return
        with self._lock:
            if not any(known() is model for known in self._routed):
                self._stack.enter_context(routing(model))
                self._routed = [known for known in self._routed if known() is not None]
                self._routed.append(weakref.ref(model))


def _trimming(original: Callable[..., int]) -> Callable[..., int]:
    """For the speculative loop, which takes back no more than it drafted."""

    def trim_prompt_cache(cache: Any, num_tokens: int) -> int:
        if not all(one.is_trimmable() for one in cache):
            return original(cache, num_tokens)
        return max((one.trim(num_tokens) for one in cache), default=0)

    return trim_prompt_cache
