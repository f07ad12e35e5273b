"""The C interface's error handler, and that failing calls leave nothing behind."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from c_api import CError, Library


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


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_failing_calls_leak_nothing(library: Library) -> None:
    """2,000 calls that fail in three places; each would leave at least 64 KiB behind."""
    rows = np.ones((1, 1, 512, 32), np.float32)
    q, k, v = library.array(rows[:, :, :1]), library.array(rows), library.array(rows)
    mask = library.array(np.zeros((1, 512), np.float32))
    wrong_sinks = library.array(np.zeros(3, np.float32))
    memory = library.ffi.new("size_t*")

    def fail_once() -> None:
        # After the mask was broadcast, in the checks, and by a back end that is not there.
        with pytest.raises(CError):
            library.attention(q, k, v, scale=1.0, mask=mask, sinks=wrong_sinks)
        with pytest.raises(CError):
            library.attention(q, k, library.array(rows[:, :, 1:]), scale=1.0)
        with pytest.raises(CError):
            library.check(library.c.mlx_h2o_set_backend(b"cuda"))

    def active() -> int:
        gc.collect()
        library.check(library.c.mlx_get_active_memory(memory))
        return int(memory[0])

    for _ in range(50):
        fail_once()
    memory_before, resident_before = active(), resident_bytes()
    for _ in range(2000):
        fail_once()
    assert active() == memory_before
    assert resident_bytes() - resident_before < 8 << 20
