"""The one name of mlx_lm that is replaced, in the modules that bind it, and put back exactly.

A context may be left at any moment: an abandoned generator closes its context from the garbage
collector, in the middle of another call of the same thread, which then does what it has left to do.
Ctrl-C may strike between any two steps: each of them may be done twice, and what it has left undone
is done by the next.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

NAME = "scaled_dot_product_attention"
"""mlx_lm's attention function, as every module of a model calls it."""


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
        modules = [vars(one) for name, one in list(sys.modules.items()) if name[:7] == "mlx_lm."]
        for namespace in (self.namespace, *modules):
            if namespace.get(NAME) is self.replacement:
                namespace[NAME] = self.original


class _Busy(threading.local):
    here = False


class _User:
    """A context that is open. One that ended without a word is not held either."""


_lock = threading.Lock()
_busy = _Busy()
_known: dict[int, _Replaced] = {}
_left: deque[_User] = deque()


@contextmanager
def replaced(namespaces: Sequence[dict[str, Any]], wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Within the context the name stands for what ``wrap`` makes of the original, in each of these
    namespaces, all of which have it. Contexts are counted."""
    user = _User()
    try:
        _settle(namespaces, wrap, user)
        yield
    finally:
        _left.append(user)
        if not _busy.here:  # else this thread is in the middle of it, and looks again behind that
            _settle((), wrap, user)


def _settle(namespaces: Sequence[dict[str, Any]], wrap: Callable[[Any], Any], user: _User) -> None:
    """Replace the name for a context, and put it back where no context needs it any more."""
    while True:
        try:
            _busy.here = True
            with _lock:
                for namespace in namespaces:
                    one = _known.get(id(namespace))
                    if one is None:
                        one = _Replaced(namespace, namespace[NAME], wrap(namespace[NAME]))
                        _known[id(namespace)] = one
                    one.users.add(user)
                    one.put()
                _forget_left()
        finally:
            _busy.here = False
        if not _left:
            return


def _forget_left() -> None:
    while _left:
        for one in _known.values():
            one.users.discard(_left[0])
        _left.popleft()
    for place, one in list(_known.items()):
        if not one.users:
            one.put_back()
            del _known[place]
