"""The one name of mlx_lm that is replaced, in the modules that bind it, and put back exactly.

A context may be left at any moment: an abandoned generator closes its context from the garbage
collector, in the middle of another call of the same thread. Ctrl-C may strike between any two
steps. So each of them may be done twice, and what was left undone is done when the next one ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from weakref import WeakSet

NAME = "scaled_dot_product_attention"
"""mlx_lm's attention function, as every module of a model calls it."""


def namespaces_of(prefix: str) -> list[dict[str, Any]]:
    """The namespaces of the modules whose names begin so; others may be imported meanwhile."""
    modules = [one for name, one in sys.modules.copy().items() if name.startswith(prefix)]
    return [vars(one) for one in modules if isinstance(one, ModuleType)]


@dataclass(eq=False)
class _Replaced:
    """In one module: what was there, what is, and the contexts that need it."""

    namespace: dict[str, Any]
    original: Any
    replacement: Any
    users: WeakSet[_User] = field(default_factory=WeakSet)

    def put(self) -> None:
        if self.namespace.get(NAME) is self.original:
            self.namespace[NAME] = self.replacement

    def put_back(self) -> None:
        """Not where others have replaced it meanwhile; and in modules that were imported meanwhile,
        which have bound the replacement."""
        for namespace in (self.namespace, *namespaces_of("mlx_lm.")):
            if namespace.get(NAME) is self.replacement:
                namespace[NAME] = self.original


class _User:
    """A context that is open. One that ended without a word is not held either."""


_lock = threading.RLock()
_known: dict[int, _Replaced] = {}


@contextmanager
def replaced(namespaces: Sequence[dict[str, Any]], wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Within the context the name stands for what ``wrap`` makes of the original, in each of these
    namespaces, all of which have it. Contexts are counted."""
    user = _User()
    try:
        with _lock:
            for namespace in namespaces:
                one = _known.get(id(namespace))
                one = one or _Replaced(namespace, namespace[NAME], wrap(namespace[NAME]))
                one.users.add(user)
                _known[id(namespace)] = one  # where the last other context has just ended, too
                one.put()
        yield
    finally:
        with _lock:
            for place, one in _known.copy().items():
                one.users.discard(user)
                if not one.users:
                    one.put_back()
                    _known.pop(place, None)
