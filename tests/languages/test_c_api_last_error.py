"""The last error of each thread in C, and that messages contain no paths of the machine."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import c_api_build
from c_api import CError, Handle, Library
from c_api_headers import ROOT


def last_error(library: Library) -> str:
    return library.ffi.string(library.c.mlx_h2o_last_error()).decode()


def fail(library: Library, name: str) -> str:
    """A call that fails; its message."""
    assert library.c.mlx_h2o_set_backend(name.encode()) == 1
    return (
        f"[use_backend] unknown back end '{name}', expected one of metal, cuda, native, composed."
    )


def on_a_thread(body: Callable[[], Any]) -> Any:
    """What ``body`` returns on a new thread, which has no last error yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(body).result()


def test_it_is_what_the_handler_was_told(library: Library) -> None:
    text = fail(library, "%s%n")
    assert library.messages == [text] and last_error(library) == text
    library.messages.clear()
    library.check(library.c.mlx_h2o_set_backend(b""))
    assert last_error(library) == text, "a call that succeeds changed it"


def test_a_thread_starts_without_one(library: Library) -> None:
    fail(library, "mine")
    library.messages.clear()
    assert on_a_thread(lambda: last_error(library)) == ""


@pytest.fixture(scope="module")
def upstream(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The H2O part over an mlx-c whose reports end with a source position, and whose calls fail
    when they are told to."""
    fakes = "upstream_error", "failing_mlx"
    return c_api_build.faked(tmp_path_factory, *fakes, declared="void fail_at(int n);")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_message_of_ours_names_a_source_file(upstream: Library) -> None:
    upstream.messages.clear()
    text = fail(upstream, "/a/b.cpp:3")
    assert upstream.messages == [f"{text} at mlx_h2o:0"]
    assert last_error(upstream) == text
    upstream.messages.clear()


def failing_call(upstream: Library) -> int:
    """The status of an operation in which a function of mlx-c fails."""
    scores = upstream.array(np.zeros((1, 1, 8), np.float32))
    positions = upstream.array(np.arange(8).reshape(1, 1, 8), "int32")
    result = Handle(upstream, "mlx_array")
    upstream.c.fail_at(0)
    try:
        arguments = (scores.value, positions.value, 4, 0, upstream.nothing, upstream.stream.value)
        return upstream.c.mlx_h2o_keep_indices(result.pointer, *arguments)
    finally:
        upstream.c.fail_at(-1)


@pytest.mark.slow
def test_the_keeping_handler_takes_the_position_off(upstream: Library) -> None:
    c, null = upstream.c, upstream.ffi.NULL
    c.mlx_set_error_handler(c.mlx_h2o_keep_error, null, null)
    try:
        assert failing_call(upstream) == 1
        kept = last_error(upstream)
        ours = fail(upstream, "ours")
        assert last_error(upstream) == ours
    finally:
        upstream.install_handler()
    assert upstream.messages == []
    assert kept == "[mlx_subtract] seeded"


@pytest.mark.slow
def test_without_it_the_words_are_the_handlers_alone(upstream: Library) -> None:
    text = on_a_thread(lambda: (failing_call(upstream), last_error(upstream)))
    assert text == (1, "a function of mlx-c failed, and told its error handler why")
    assert len(upstream.messages) == 1 and "seeded at " in upstream.messages.pop()


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("seeded at /home/me/mlx-c/mlx/c/ops.cpp:12", "seeded"),
        ("seeded at /Users/A B/at home/mlx/c/array.cpp:7", "seeded"),
        ("looked at 3 at mlx/c/error.h:1", "looked at 3"),
        ("failed at step:12", "failed at step:12"),
        ("at ops.cpp:12", "at ops.cpp:12"),
        ("seeded at ops.cpp:", "seeded at ops.cpp:"),
        ("seeded at ops.cpp", "seeded at ops.cpp"),
        ("", ""),
        ("12", "12"),
    ],
)
def test_a_source_position_is_known_as_one(library: Library, message: str, kept: str) -> None:
    library.c.mlx_h2o_keep_error(message.encode(), library.ffi.NULL)
    assert last_error(library) == kept


def test_messages_of_this_build_name_no_place(library: Library) -> None:
    one, two = library.array(np.zeros((2, 3))), library.array(np.zeros((4, 5)))
    place = Handle(library, "mlx_array")
    with pytest.raises(CError) as caught:
        library.check(library.c.mlx_add(place.pointer, one.value, two.value, library.stream.value))
    assert str(ROOT) not in str(caught.value) and ".cpp" not in str(caught.value)
    assert Path(__file__).name not in str(caught.value)
