"""Rows that a failed step has left half changed, so that they must not be used."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Torn:
    """Takes the place of a table; any access raises an error that says why."""

    def __init__(self, said: str) -> None:
        self._said = said

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"[H2OKVCache] {self._said} was interrupted while its rows changed, by an error or a "
            "signal, and its rows are incomplete: make a new cache."
        )


def changes(method: _Method) -> _Method:
    """Decorates a method that changes rows step by step: if it fails, for example because memory
    runs out, the cache drops its rows, so that nobody reads wrong ones."""

    @functools.wraps(method)
    def whole(cache: Any, /, *args: Any, **given: Any) -> Any:
        try:
            return method(cache, *args, **given)
        except BaseException:
            cache._give_up()
            raise

    return cast(_Method, whole)
