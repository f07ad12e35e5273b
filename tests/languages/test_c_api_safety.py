"""The C interface's error handler."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from c_api import Library


def test_handlers_come_and_go(library: Library) -> None:
    c, ffi = library.c, library.ffi
    received: list[tuple[int, str]] = []
    released: list[int] = []

    @ffi.callback("void(const char*, void*)")
    def handler(message: Any, data: Any) -> None:
        received.append((int(ffi.cast("intptr_t", data)), ffi.string(message).decode()))

    @ffi.callback("void(void*)")
    def release(data: Any) -> None:
        released.append(int(ffi.cast("intptr_t", data)))

    try:
        c.mlx_set_error_handler(handler, ffi.cast("void*", 7), release)
        c.mlx_array_ndim(library.nothing)
        assert received == [(7, "expected a non-empty mlx_array")] and released == []
        c.mlx_set_error_handler(handler, ffi.cast("void*", 8), release)
        assert released == [7]
    finally:
        library.install_handler()
    assert released == [7, 8]


def test_the_default_handler_prints_and_returns(
    library: Library, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        library.c.mlx_set_error_handler(library.ffi.NULL, library.ffi.NULL, library.ffi.NULL)
        assert library.c.mlx_h2o_set_backend(b"%s%n") == 1
    finally:
        library.install_handler()
    printed = capfd.readouterr().err
    assert printed.startswith("MLX error: [use_backend] unknown back end '%s%n', expected one of")


def test_handlers_are_replaced_while_threads_fail(library: Library) -> None:
    calls = 400
    before = len(library.messages)

    def fail() -> None:
        for _ in range(calls):
            assert library.c.mlx_array_ndim(library.nothing) == 0

    threads = [threading.Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(calls):
        library.install_handler()
    for thread in threads:
        thread.join()
    assert len(library.messages) - before == 4 * calls
    library.messages.clear()
