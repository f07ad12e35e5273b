"""Eviction that stays with a model until it is removed, for callers that make no caches themselves.

The interface of Genoma Labs' kv-cache-eviction-mla: a budget of heavy hitters between the sinks and
the recent rows, by the attention mass that they accumulated; there over all heads, here each head
keeps its own. It serves every model that :func:`mlx_h2o.make_prompt_cache` serves, latent attention
(MLA) among them, and nothing of the model's code is replaced.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from mlx.nn.layers.base import Module

from ..config import H2OConfig
from ..errors import check_int
from .prompt_cache import evicting_caches, make_prompt_cache
from .routing import model_name, routing

_lock = threading.Lock()
_MARK = "_mlx_h2o_installed"


def install_kv_eviction(
    model: Module,
    *,
    budget: int = 2048,
    n_sink: int = 4,
    n_recent: int = 256,
    evict_every: int = 1,
    policy: str = "h2o-sum",
    **settings: Any,
) -> None:
    """Make mlx_lm's own ``make_prompt_cache(model)`` return evicting caches from now on.

    Until :func:`remove_kv_eviction`, generation by mlx_lm keeps ``n_sink + budget + n_recent`` rows
    per layer and head after an eviction, and at most ``evict_every - 1`` more between evictions.
    The model is routed meanwhile.

    Args:
        model: an mlx_lm model.
        budget: rows kept by score.
        n_sink: first positions, never evicted.
        n_recent: newest rows, never evicted.
        evict_every: single-token steps per eviction.
        policy: what ranks the rows; "h2o-sum" is the published accumulated attention.
        settings: further settings of H2OConfig.

    Raises:
        ValueError: eviction is installed already, settings out of range, or a model that cannot
            be served.
    """
    sizes = {"budget": budget, "n_sink": n_sink, "n_recent": n_recent, "evict_every": evict_every}
    for name, size in sizes.items():
        check_int("install_kv_eviction", name, size, 0)
    waiting = evict_every - 1  # rows that come before the next eviction
    config = H2OConfig.of(
        max_kv_size=n_sink + budget + n_recent + waiting,
        sink_size=n_sink,
        heavy_size=budget + waiting,
        recent_size=n_recent,
        evict_every=evict_every,
        policy=policy,
        **settings,
    )
    with _lock:
        if getattr(model, _MARK, None) is not None:
            raise ValueError(
                f"[install_kv_eviction] eviction is installed on {model_name(model)} already: "
                "expected remove_kv_eviction first."
            )
        # Refuses what cannot be served, before anything changes.
        fresh = make_prompt_cache(model, config, layers="equal")
        context = contextlib.ExitStack()
        context.enter_context(routing(model))
        # Attributes of this one model, which shadow its class's: no other model sees them.
        object.__setattr__(model, "make_cache", lambda: copy.deepcopy(fresh))
        object.__setattr__(model, _MARK, weakref.finalize(model, context.close))


def remove_kv_eviction(model: Module) -> None:
    """Undo :func:`install_kv_eviction`. Existing caches still work, but need ``routing`` again.

    Raises:
        ValueError: eviction is not installed on this model.
    """
    with _lock:
        leave = getattr(model, _MARK, None)
        if leave is None:
            raise ValueError(
                f"[remove_kv_eviction] eviction is not installed on {model_name(model)}: expected "
                "install_kv_eviction first."
            )
        object.__delattr__(model, "make_cache")
        object.__delattr__(model, _MARK)
        leave()


def reset_eviction_scores(caches: Sequence[Any]) -> None:
    """Forget the scores of all stored rows, so that what follows decides anew.

    A new generation with new caches starts without scores anyway; this is for a kept cache.

    Raises:
        ValueError: none of the caches evicts.
    """
    found = list(evicting_caches(caches))
    if not found:
        raise ValueError("[reset_eviction_scores] none of the caches evicts, expected some.")
    for cache in found:
        cache.flush()  # the surplus of a chunk goes by the scores that it has
        cache.reset_scores()
