"""Which cache handed out an array of keys: the one thing that attention can always be asked.

Models pass None, another layer's cache or a list of caches to attention, but they pass on the
keys themselves. A cache holds what it handed out until its next update, so that an identity stays
its own for as long.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import H2OKVCache

__all__ = ["forget", "owner_of", "register"]

_owners: dict[int, weakref.ref[H2OKVCache]] = {}


def register(keys: Any, cache: weakref.ref[H2OKVCache]) -> int:
    """Remember who handed out ``keys``: an array, or packed rows, known by their words."""
    identity = id(keys[0] if isinstance(keys, tuple) else keys)
    _owners[identity] = cache
    return identity


def forget(identity: int) -> None:
    """What is known by this identity is held no longer."""
    _owners.pop(identity, None)


def owner_of(keys: object) -> H2OKVCache | None:
    """The living cache that handed out this very array object, or these words, or None."""
    keys = keys[0] if isinstance(keys, tuple) and keys else keys
    found = _owners.get(id(keys))
    return None if found is None else found()
