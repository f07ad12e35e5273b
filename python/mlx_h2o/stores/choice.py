"""Which store the settings of a cache ask for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..config import H2OConfig
from .latent_store import LatentRowStore
from .mixed_store import MixedRowStore
from .packing import Packing
from .quantized_store import ArrayHandingStore, QuantizedRowStore
from .storage import Storage
from .store import RowStore

__all__ = ["empty_store", "quantized_store", "restored_store"]


def empty_store(config: H2OConfig, keys: mx.array, values: mx.array, owner: str) -> Storage:
    """A store without rows, for rows like ``keys`` and ``values``.

    Raises ValueError, naming ``owner``, for rows that cannot be quantised as ``config`` says.
    """
    if config.kv_bits is None:
        return RowStore.empty_like(keys, values)
    if config.dense_rows:
        packings = Packing.tiers(config, keys, values, owner)
        return MixedRowStore.empty_like(keys, values, packings, _newest(config))
    return _class_of(config).empty_like(keys, values, _packing(config, keys, values, owner))


def quantized_store(config: H2OConfig, store: Storage, owner: str) -> Storage:
    """The rows of a dense store, quantised as ``config`` says; errors as ``empty_store``."""
    keys, values = store.dense()
    packing = _packing(config, keys, values, owner)
    return _class_of(config).of_rows(keys, values, store.importance, store.positions, packing)


def restored_store(
    config: H2OConfig, keys: Any, values: Any, importance: mx.array, positions: mx.array
) -> Storage:
    """The store whose ``fetch`` gave ``keys`` and ``values``."""
    if config.kv_bits is None:
        return RowStore(keys, values, importance, positions)
    if config.dense_rows:
        packings = Packing.tiers(config, keys[-1], values[-1], "this cache")
        rows = list(keys), list(values), importance, positions
        return MixedRowStore.restored(*rows, packings, _newest(config))
    packing = Packing.restored(config, keys)
    if config.kv_handed != "latents":
        values = tuple(values)
    cls: Any = _class_of(config)
    store: Storage = cls(tuple(keys), values, importance, positions, packing)
    return store


def _newest(config: H2OConfig) -> int:
    """Rows that stay dense: with speculation those that are provisional, too."""
    return config.dense_rows + (config.speculative + 1 if config.speculative else 0)


_Packed = type[QuantizedRowStore] | type[LatentRowStore]
_CLASSES: dict[str, _Packed] = {
    "packed": QuantizedRowStore,
    "arrays": ArrayHandingStore,
    "latents": LatentRowStore,
}


def _class_of(config: H2OConfig) -> _Packed:
    return _CLASSES[config.kv_handed]


def _packing(config: H2OConfig, keys: mx.array, values: mx.array, owner: str) -> Packing:
    # The values of latent attention, rotary parts of its keys, stay as they are.
    return Packing.of(config, keys, keys if config.kv_handed == "latents" else values, owner)
