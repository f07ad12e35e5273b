"""Which cache handed out an array of keys: the one thing that attention can always be asked.

Models pass None, another layer's cache or a list of caches to attention, but they pass on the
keys themselves. Views of what is stored are held until the next update, so that their identity
stays their own for as long; arrays that were unpacked for a chunk are not held, or every layer
would keep some.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from .cache import H2OKVCache

__all__ = ["forget", "owner_of", "register"]

_Owner = tuple["weakref.ref[H2OKVCache]", "weakref.ref[mx.array] | None"]
_owners: dict[int, _Owner] = {}


def register(keys: Any, cache: weakref.ref[H2OKVCache], *, held: bool) -> int:
    """Remember who handed out ``keys``: an array, or packed rows, known by their words.

    ``held`` promises that the cache holds them until it calls ``forget``.
    """
    keys = keys[0] if isinstance(keys, tuple) else keys
    _owners[id(keys)] = cache, None if held else weakref.ref(keys)
    return id(keys)


def forget(identity: int) -> None:
    """What was known by this identity is held no longer."""
    _owners.pop(identity, None)


def owner_of(keys: object) -> H2OKVCache | None:
    """The living cache that handed out this very array object, or these words, or None."""
    keys = keys[0] if isinstance(keys, tuple) and keys else keys
    found = _owners.get(id(keys))
    if found is None or (found[1] is not None and found[1]() is not keys):
        return None
    return found[0]()
