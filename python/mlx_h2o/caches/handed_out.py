"""Which cache handed out an array of keys: the one thing that attention can always be asked.

Models pass None, another layer's cache or a list of caches to attention, but they pass on the
keys themselves. What is known of an array goes with it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import mlx.core as mx


class _Known(weakref.ref[mx.array]):
    """Keys that a cache has handed out, or the words of packed ones, as long as they live."""

    __slots__ = ("owner", "place", "rows")
    owner: weakref.ref[Any]
    place: int
    rows: Any


_known: dict[int, _Known] = {}
_latest = threading.local()


def _forget(gone: _Known, known: dict[int, _Known] = _known) -> None:
    del known[gone.place]
    gone.rows = None  # the owner may know it still


def hand_out(owner: Any, keys: Any, values: Any, rows: Any = None) -> tuple[Any, Any]:
    """Keys and values, of which it is known from now on whose they are, and which ``rows``
    attention reads instead, if any. The owner knows them as ``handed``."""
    words = keys[0] if isinstance(keys, tuple) else keys
    found = _Known(words, _forget)
    found.place, found.rows = id(words), rows
    _latest.cache = found.owner = weakref.ref(owner)
    _known[found.place] = owner.handed = found
    return keys, values


def owner_of(keys: object) -> tuple[Any, Any]:
    """The living cache that handed out this very array object, or these words, or None; and the
    keys and values that are read instead: of mixed precision the newest, which are not packed; of
    groups of heads those of each; or None."""
    found = _known.get(id(keys[0] if isinstance(keys, tuple) and keys else keys))
    return (None, None) if found is None else (found.owner(), found.rows)


class EachLayersMask:
    """One mask for all layers of a model, though their budgets differ: whoever reads it gets that
    of the rows that a cache handed out last, which are the reader's.

    Attention of ours asks the owner of its keys instead, and MLX operations on arrays take it.
    mlx_lm's own attention does not: the cache refuses it first, when asked for ``bits``.
    """

    dtype = mx.bool_

    def __mlx_array__(self) -> mx.array:
        cache = _latest.cache()
        found = cache and cache.mask_of_update(return_array=True)
        return found if isinstance(found, mx.array) else mx.array(True)
