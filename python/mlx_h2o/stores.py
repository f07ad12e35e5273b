"""Which store the settings of a cache ask for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .config import H2OConfig
from .storage import Storage
from .store import RowStore

__all__ = ["empty_store", "restored_store"]


def empty_store(config: H2OConfig, keys: mx.array, values: mx.array) -> Storage:
    """A store without rows, for rows like ``keys`` and ``values``."""
    return RowStore.empty_like(keys, values)


def restored_store(
    config: H2OConfig, keys: Any, values: Any, importance: mx.array, positions: mx.array
) -> Storage:
    """The store whose ``fetch`` gave ``keys`` and ``values``."""
    return RowStore(keys, values, importance, positions)
