"""Which cache handed out an array of keys: the one thing that attention can always be asked.

Models pass None, another layer's cache or a list of caches to attention, but they pass on the
keys themselves. Only weak references are kept: a strong one would stop MLX from reusing the
buffer of the keys for the next update.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from ..stores.storage import Stored
    from .bounded import BoundedRows

__all__ = ["owner_of", "register"]

_Entry = tuple["weakref.ref[mx.array]", "weakref.ref[BoundedRows]"]
_entries: dict[int, _Entry] = {}


def register(keys: Stored, cache: BoundedRows) -> None:
    """Remember that ``cache`` handed out ``keys``, for as long as the array object lives.

    Packed keys are known by their words: a tuple has no weak references.
    """
    keys = keys[0] if isinstance(keys, tuple) else keys
    identity = id(keys)

    def forget(_: object) -> None:
        _entries.pop(identity, None)

    _entries[identity] = (weakref.ref(keys, forget), weakref.ref(cache))


def owner_of(keys: object) -> BoundedRows | None:
    """The living cache that handed out this very array object, or these words, or None."""
    keys = keys[0] if isinstance(keys, tuple) and keys else keys
    entry = _entries.get(id(keys))
    if entry is None or entry[0]() is not keys:
        return None
    return entry[1]()
