"""Rows that a step has left half changed: nobody may go on with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Torn:
    """In the place of a table: whoever asks it for anything is told."""

    def __init__(self, said: str) -> None:
        self._said = said

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"[H2OKVCache] {self._said} was interrupted while its rows changed, by an error or a "
            "signal, and its rows are incomplete: make a new cache."
        )


def changes(method: _Method) -> _Method:
    """Of a method that changes rows step by step: where it does not come to its end, such as for
    want of memory, the cache holds no rows, so that no one can read wrong ones."""

    @functools.wraps(method)
    def whole(cache: Any, /, *args: Any, **given: Any) -> Any:
        try:
            return method(cache, *args, **given)
        except BaseException:
            cache._give_up()
            raise

    return cast(_Method, whole)
