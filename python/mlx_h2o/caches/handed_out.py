"""Which cache handed out an array of keys: the only link from an attention call to its cache.

Models may pass None, another layer's cache or a list of caches to attention, but they always pass
on the keys. An entry lives as long as its array.
"""

import threading
import weakref
from typing import Any

import mlx.core as mx


class _Known(weakref.ref[mx.array]):
    """A weak reference to keys that a cache handed out, or to the words of packed keys."""

    __slots__ = ("owner", "place", "rows")
    owner: weakref.ref[Any]
    place: int
    rows: Any


_known: dict[int, _Known] = {}
_latest = threading.local()


def _forget(gone: _Known, known: dict[int, _Known] = _known) -> None:
    del known[gone.place]
    gone.rows = None  # the owner may still refer to this


def hand_out(owner: Any, keys: Any, values: Any, rows: Any = None) -> tuple[Any, Any]:
    """Register keys and values as handed out by ``owner``, which keeps the entry as ``handed``, and
    return them. ``rows``: what attention reads instead, if anything."""
    words = keys[0] if isinstance(keys, tuple) else keys
    found = _Known(words, _forget)
    found.place, found.rows = id(words), rows
    _latest.cache = found.owner = weakref.ref(owner)
    _known[found.place] = owner.handed = found
    return keys, values


def owner_of(keys: object) -> tuple[Any, Any]:
    """The cache that handed out this very array object, or these words, if it still exists, else
    None; and the keys and values that attention reads instead, or None: in mixed precision the
    dense tail, for groups of heads the rows of each group."""
    found = _known.get(id(keys[0] if isinstance(keys, tuple) and keys else keys))
    return (None, None) if found is None else (found.owner(), found.rows)


class EachLayersMask:
    """One mask object for all layers of a model, though their budgets differ: read as an array, it
    is the mask of the rows handed out last, which belong to the layer that reads it.

    Our attention asks the owner of its keys instead; MLX operations read it as an array. mlx_lm's
    own attention never sees it: the cache refuses first, when asked for ``bits``.
    """

    dtype = mx.bool_

    def __mlx_array__(self) -> mx.array:
        cache = _latest.cache()
        found = cache and cache.mask_of_update(return_array=True)
        return found if isinstance(found, mx.array) else mx.array(True)
