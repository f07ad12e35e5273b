"""Which cache handed out an array of keys: the one thing that attention can always be asked.

Models pass None, another layer's cache or a list of caches to attention, but they pass on the
keys themselves. Views of what is stored are held until the next update, so that their identity
stays their own for as long; arrays that were unpacked for a chunk are not held, or every layer
would keep some.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import mlx.core as mx

_Owner = tuple["weakref.ref[Any]", "weakref.ref[mx.array] | None"]
_owners: dict[int, _Owner] = {}
_latest = threading.local()


class HandedOut:
    """Keys and values that a cache has handed out, packed ones known by their words.

    Attributes:
        rows: them, where they are held.
        newest: those of mixed precision that are not packed, which attention reads as they are.
    """

    rows: tuple[Any, Any] | None = None
    newest: tuple[mx.array, mx.array] | None = None
    _identity = 0

    def __init__(self, cache: object) -> None:
        self._cache: weakref.ref[Any] = weakref.ref(cache)

    def give(
        self, keys: Any, values: Any, held: bool, newest: tuple[mx.array, mx.array] | None = None
    ) -> tuple[Any, Any]:
        """Keys and values that are known from now on; if ``held`` until ``release``."""
        words = keys[0] if isinstance(keys, tuple) else keys
        if self._identity:
            self.release()
        _latest.cache = self._cache
        self._identity = id(words)  # before it is known by it, or it would stay known
        _owners[id(words)] = self._cache, None if held else weakref.ref(words)
        self.rows = (keys, values) if held else None
        self.newest = newest
        return keys, values

    def release(self) -> None:
        """Hold them no longer, so that MLX may write in place."""
        self.rows = self.newest = None
        if self._identity:
            # Of an array that was not held the identity may be another's by now.
            known = _owners.get(self._identity)
            if known is not None and known[0] is self._cache:
                _owners.pop(self._identity, None)
            self._identity = 0

    __del__ = release


def owner_of(keys: object) -> Any:
    """The living cache that handed out this very array object, or these words, or None."""
    keys = keys[0] if isinstance(keys, tuple) and keys else keys
    found = _owners.get(id(keys))
    if found is None or (found[1] is not None and found[1]() is not keys):
        return None
    return found[0]()


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
