"""Names replaced in other people's modules: counted, thread safe, and put back exactly."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Target:
    """A name in a module's namespace, and what makes its replacement from the original."""

    namespace: dict[str, Any]
    name: str
    wrap: Callable[[Any], Any]
    must_exist: bool = True
    """False: a name that is not there is added, and taken away in the end."""

    @property
    def key(self) -> tuple[int, str]:
        return id(self.namespace), self.name


def always(replacement: Any) -> Callable[[Any], Any]:
    """What replaces any original by this."""
    return lambda original: replacement


@dataclass(eq=False)
class _Replaced:
    target: Target
    existed: bool
    original: Any
    replacement: Any
    users: int = 0

    def restore(self, namespace: dict[str, Any]) -> None:
        """Put the original back where a namespace has the replacement."""
        name = self.target.name
        if namespace.get(name) is not self.replacement:
            return
        if self.existed:
            namespace[name] = self.original
        else:
            del namespace[name]


class Replacements:
    """The names that are replaced now, and by how many contexts each.

    A context may be left at any moment: an abandoned generator closes its context from the
    garbage collector, in the middle of another call of the same thread. So leaving never waits:
    it queues its work, and whoever holds the lock does it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replaced: dict[tuple[int, str], _Replaced] = {}
        self._left: deque[Target] = deque()

    def enter(self, targets: Sequence[Target]) -> None:
        """Replace each target that is not replaced yet, and count one more user of it.

        Raises KeyError, having done nothing, if a namespace lacks a name that must exist.
        """
        for target in targets:
            if target.must_exist:
                target.namespace[target.name]
        with self._lock:
            at = 0
            try:
                for at in range(len(targets)):
                    replaced = self._replaced.get(targets[at].key)
                    if replaced is None or not replaced.users:
                        replaced = self._replace(targets[at])
                    replaced.users += 1
            except BaseException:  # such as Ctrl-C: all or none
                for target in targets[:at]:
                    self._one_user_less(target)
                if targets[at].key in self._replaced and not self._replaced[targets[at].key].users:
                    self._one_user_less(targets[at])
                raise
        self._drain()

    def leave(self, targets: Sequence[Target]) -> None:
        """Undo one ``enter`` of the same targets; the last user of each puts its original back."""
        self._left.extend(targets)
        self._drain()

    @contextmanager
    def replaced(self, targets: Sequence[Target]) -> Iterator[None]:
        """Within the context these targets are replaced."""
        self.enter(targets)
        try:
            yield
        finally:
            self.leave(targets)

    def _replace(self, target: Target) -> _Replaced:
        if target.key in self._replaced:  # of one that did not get as far as to be taken out
            self._one_user_less(target)
        original = target.namespace.get(target.name)
        existed = target.name in target.namespace
        replaced = _Replaced(target, existed, original, target.wrap(original))
        self._replaced[target.key] = replaced
        target.namespace[target.name] = replaced.replacement
        return replaced

    def _one_user_less(self, target: Target) -> None:
        replaced = self._replaced[target.key]
        replaced.users = max(0, replaced.users - 1)
        if not replaced.users:
            _put_back(replaced)
            del self._replaced[target.key]

    def _drain(self) -> None:
        # Whoever fails to take the lock may go: its holder looks again after letting go.
        while self._left and self._lock.acquire(blocking=False):
            try:
                while self._left:
                    self._one_user_less(self._left.popleft())
            finally:
                self._lock.release()


def _put_back(replaced: _Replaced) -> None:
    replaced.restore(replaced.target.namespace)
    # A module that was imported meanwhile may have bound the replacement by name.
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm."):
            replaced.restore(vars(module))


PATCHES = Replacements()
"""The one set of names that this package replaces."""
