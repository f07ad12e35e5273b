"""The models that `nox -s yardsticks` fetches, each loaded once; tests of missing ones skip."""

import functools
from typing import Any

import pytest

import mlx_h2o
from benchmark_scripts import script

__all__ = ["fetched", "loaded"]


def fetched(name: str) -> str:
    """A model's folder; skips the calling test if the model was not fetched."""
    with script("yardsticks", "tools") as tool:
        folder = tool.models_folder() / name
    if not (folder / "yardstick.json").exists():
        pytest.skip(f"NO {name} in {folder.parent}: nox -s yardsticks fetches it")
    return str(folder)


def loaded(name: str) -> tuple[Any, Any]:
    """Model and tokenizer; skips like ``fetched``."""
    return _load(fetched(name))


@functools.lru_cache(maxsize=1)
def _load(folder: str) -> tuple[Any, Any]:
    return mlx_h2o.load(folder)
