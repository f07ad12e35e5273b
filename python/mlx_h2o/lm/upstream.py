"""The names in mlx_lm that this package replaces, and what its subclasses override there.

A new version of mlx_lm breaks this table or nothing. A name that is gone is an error before
anything is replaced: left out in silence, caches would grow without bound and nobody would be told.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import mlx_lm

from .replacements import Target

__all__ = ["ATTENTION", "NAMES", "VERSIONS", "missing", "original", "target"]

VERSIONS = "0.32"
"""The versions of mlx_lm in which the table was looked up, as pyproject.toml requires them."""

ATTENTION = "scaled_dot_product_attention"
"""Bound by this name in every module of a model; replaced there, too."""

NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "models.base": {ATTENTION: ()},
    "generate": {
        "argparse": (),
        "can_trim_prompt_cache": (),
        "generate": (),
        "load": (),
        "load_prompt_cache": (),
        "make_prompt_cache": (),
        "speculative_generate_step": (),
        "trim_prompt_cache": (),
    },
    "chat": {"argparse": (), "load": (), "make_prompt_cache": (), "stream_generate": ()},
    "cache_prompt": {"argparse": (), "load": (), "make_prompt_cache": (), "save_prompt_cache": ()},
    "benchmark": {"argparse": (), "load": ()},
}
"""By module of mlx_lm: the names, and of a class the methods that subclasses override or call."""


def target(module: str, name: str, wrap: Callable[[Any], Any]) -> Target:
    """What replaces a name of the table, by what ``wrap`` makes of the original.

    Raises:
        ValueError: the installed mlx_lm does not have it.
    """
    original(module, name)
    return Target(vars(importlib.import_module(f"mlx_lm.{module}")), name, wrap)


def original(module: str, name: str) -> Any:
    """What a name of the table stands for now.

    Args:
        module: of mlx_lm, such as "generate" or "models.cache".
        name: in this module.

    Raises:
        ValueError: the installed mlx_lm does not have it, or not all of its methods.
    """
    if lacks := _missing(module, name):
        raise ValueError(
            f"[mlx_h2o] mlx_lm {mlx_lm.__version__} has no {' and no '.join(lacks)}, which "
            f"eviction needs: expected mlx_lm {VERSIONS}."
        )
    return getattr(importlib.import_module(f"mlx_lm.{module}"), name)


def missing() -> list[str]:
    """What the installed mlx_lm lacks of the table, as dotted names."""
    return [
        lack for module, names in NAMES.items() for name in names for lack in _missing(module, name)
    ]


def _missing(module: str, name: str) -> list[str]:
    methods = NAMES[module][name]
    found = getattr(importlib.import_module(f"mlx_lm.{module}"), name, None)
    if found is None:
        return [f"mlx_lm.{module}.{name}"]
    return [f"mlx_lm.{module}.{name}.{each}" for each in methods if not hasattr(found, each)]
