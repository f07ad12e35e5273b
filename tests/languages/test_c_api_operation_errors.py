"""What the C operations on packed rows and on a cache's rows refuse, with Python's messages."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from c_api import CError, Library
from c_api_headers import functions
from mlx_h2o import fast
from wrong_calls import wrong_calls

NAMES = {
    "q": "queries", "k": "keys", "v": "values", "quantised_keys": "keys",
    "quantised_values": "values", "new_keys": "key_rows", "new_values": "value_rows",
}  # fmt: skip
"""C's, of what Python calls otherwise."""


def in_c(library: Library, op: str, given: dict[str, Any]) -> None:
    named = {NAMES.get(name, name): value for name, value in given.items()}
    if "queries" in given:
        named |= {"queries": given["q"], "counted_queries": given["queries"]}
    if isinstance(named.get("recent_start"), int):
        named["recent_start"] = np.array(named["recent_start"], np.int32)
    library.call(op, **named)


@pytest.mark.parametrize(("op", "text", "given"), wrong_calls())
def test_c_refuses_with_the_words_of_the_python_package(
    library: Library, op: str, text: str, given: dict[str, Any]
) -> None:
    with pytest.raises(ValueError) as expected:
        getattr(fast, op)(**given)
    with pytest.raises(CError) as found:
        in_c(library, op, given)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("wrong", [mx.zeros((3,), mx.int32), mx.zeros((), mx.float32)])
def test_one_number_per_sequence(library: Library, wrong: mx.array) -> None:
    rows = [mx.zeros((1, 2, 5), dtype) for dtype in (mx.float32, mx.int32)]
    with pytest.raises(CError) as caught:
        library.keep_indices(*rows, 2, recent_start=wrong)
    found = f"{str(wrong.dtype).removeprefix('mlx.core.')} {wrong.shape}"
    assert str(caught.value) == (
        f"[keep_indices] recent_start is {found}, expected int32 () or [B] = (1,)."
    )


@pytest.mark.parametrize(("op", "text", "given"), wrong_calls(of_c_alone=True))
def test_calls_of_c_alone_are_refused(
    library: Library, op: str, text: str, given: dict[str, Any]
) -> None:
    with pytest.raises(CError) as caught:
        library.call(op, **given)
    assert str(caught.value).startswith(f"[{op}] {text}")


ERRORS = ("last_error", "keep_error")


def nothing(library: Library, kind: Any) -> Any:
    """Zero, NULL or an empty handle of a C type."""
    ffi = library.ffi
    return ffi.NULL if kind.kind == "pointer" else ffi.new(ffi.getctype(kind, "*"))[0]


@pytest.mark.parametrize("places", [False, True])
def test_empty_arguments_are_refused_by_name(library: Library, places: bool) -> None:
    """With NULL in every place, and with places for the results and nothing else."""
    others = tuple(f"mlx_h2o_{word}" for word in ("config", "set", "backend", "threads", *ERRORS))
    names = [
        one for one in functions() if one.startswith("mlx_h2o_") and not one.startswith(others)
    ]
    assert len(names) >= 10
    for name in names:
        function = getattr(library.c, name)
        kinds = library.ffi.typeof(function).args
        given = [nothing(library, kind) for kind in kinds]
        kept = []
        for index, kind in enumerate(kinds):
            if places and kind.kind == "pointer" and "mlx_" in kind.cname:
                kept.append(library.ffi.new(kind))
                given[index] = kept[-1]
        assert function(*given) == 1
        (text,) = library.messages
        library.messages.clear()
        assert text.startswith(f"[{name.removeprefix('mlx_h2o_')}] ")
        assert ("is NULL, expected a place" in text) != places
        assert not places or "an empty handle" in text or "bits is 0" in text
        assert not any(place[0].ctx for place in kept)
