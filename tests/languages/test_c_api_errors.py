"""What the C interface refuses: messages, untouched outputs, and no leaks."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from c_api import CError, Handle, Library
from mlx_h2o import use_backend
from wrong_calls import ATTENTION

Q, K, V = (1, 4, 2, 32), (1, 2, 5, 32), (1, 2, 5, 24)


def message_of_python(function: Any, *arguments: Any, **more: Any) -> str:
    with pytest.raises(ValueError) as caught:
        function(*arguments, **more)
    return str(caught.value)


@pytest.mark.parametrize("name", ["unknown", "Metal", "%s%n", "metal"])
def test_a_back_end_that_cannot_be_named(library: Library, name: str) -> None:
    if name == "metal" and mx.metal.is_available():
        pytest.skip("it can be named here")

    def enter() -> None:
        with use_backend(name):
            pass

    with pytest.raises(CError) as caught, library.using(name):
        pass
    assert str(caught.value) == message_of_python(enter)
    if name != "metal":
        with pytest.raises(CError, match="expected one of metal, cuda, native, composed"):
            library.backend_status(name)


MASK = mx.ones((2, 5), mx.bool_)
MODES = {
    "mask_mode is 'Causal', expected '', 'causal' or 'array'.": ("Causal", None),
    "mask_mode is 'array' and mask_arr an empty handle, expected a mask.": ("array", None),
    "mask_mode is 'causal' and mask_arr an array, expected mask_mode 'array'.": ("causal", MASK),
    "mask_mode is '' and mask_arr an array, expected mask_mode 'array'.": ("", MASK),
    "mask_mode is '%s%n%n', expected '', 'causal' or 'array'.": ("%s%n%n", None),
}


@pytest.mark.parametrize("text", MODES)
def test_mask_mode_and_mask_go_together(library: Library, text: str) -> None:
    mode, mask = MODES[text]
    with pytest.raises(CError) as caught:
        library.attention(*map(mx.zeros, (Q, K, V)), scale=1.0, mask_mode=mode, mask_arr=mask)
    assert str(caught.value) == f"[{ATTENTION}] {text}"


def test_an_empty_stream(library: Library) -> None:
    """Other handles that are empty: test_c_api_operation_errors.py."""
    nowhere, rows = Handle(library, "mlx_stream"), mx.zeros((1, 1, 3))
    text = "the stream is an empty handle, expected a stream"
    with pytest.raises(CError, match=text):
        library.attention(*map(mx.zeros, (Q, K, V)), scale=1.0, s=nowhere)
    with pytest.raises(CError, match=text):
        library.keep_indices(rows, rows.astype(mx.int32), 1, s=nowhere)


def test_a_failed_call_leaves_results_untouched(library: Library) -> None:
    arrays = [library.array(np.ones(shape, np.float32)) for shape in (Q, K, V)]
    results = library.attention(*arrays, scale=1.0)
    before = {name: library.numpy(handle) for name, handle in results.items()}
    status = library.c.mlx_h2o_scaled_dot_product_attention_with_scores(
        *(results[name].pointer for name in ("out", "scores", "lse")),
        *(*(a.value for a in arrays), math.nan, b"", *[library.nothing] * 3),
        library.stream.value,
    )
    with pytest.raises(CError):
        library.check(status)
    for name, handle in results.items():
        assert np.array_equal(library.numpy(handle), before[name])


def test_mlx_own_errors_cross_as_text(library: Library, tmp_path: Path) -> None:
    """Functions that return no status report too, and give 0, NULL or an empty handle."""
    c, null = library.c, library.ffi.NULL
    matrix, flag = library.array(np.zeros((2, 3))), library.array([True])
    reports = {
        "ndim": lambda: c.mlx_array_ndim(library.nothing) == 0,
        "shape": lambda: c.mlx_array_shape(library.nothing) == null,
        "dim": lambda: c.mlx_array_dim(matrix.value, 7) == 0,
        "data": lambda: c.mlx_array_data_float32(library.nothing) == null,
        "wider": lambda: c.mlx_array_data_float32(flag.value) == null,
        "new": lambda: not c.mlx_array_new_data(null, [2], 1, 0).ctx,
        "dtype": lambda: not c.mlx_array_new_data(null, [0], 1, 14).ctx,
        "string": lambda: not c.mlx_string_new_data(null).ctx,
        "kernel": lambda: (
            not c.mlx_fast_metal_kernel_new(
                *(b"k", *2 * [library.ffi.new("mlx_vector_string*")[0]], b"", b"", False, False)
            ).ctx
        ),
    }
    for name, refused in reports.items():
        assert refused(), name
        assert len(library.messages) == 1 and library.messages.pop(), name
    place = Handle(library, "mlx_array")
    path = str(tmp_path / "%s%n%p.npy")
    with pytest.raises(CError, match="%s%n%p"):
        library.check(c.mlx_load(place.pointer, path.encode(), library.stream.value))
    one, two = library.array(np.zeros((2, 3))), library.array(np.zeros((4, 5)))
    with pytest.raises(CError, match="[Bb]roadcast"):
        library.check(c.mlx_add(place.pointer, one.value, two.value, library.stream.value))
    with pytest.raises(CError, match="place for the result"):
        library.check(c.mlx_add(null, one.value, one.value, library.stream.value))


def test_a_lazy_array_has_no_data_yet(library: Library) -> None:
    one, two = library.array(np.ones(3, np.float32)), Handle(library, "mlx_array")
    library.check(library.c.mlx_add(two.pointer, one.value, one.value, library.stream.value))
    assert library.c.mlx_array_data_float32(two.value) == library.ffi.NULL
    assert library.messages.pop() == "[array data] the array is not evaluated"


def test_metal_kernels_report_what_mlx_says(library: Library) -> None:
    if mx.metal.is_available():
        pytest.skip("Metal is available")
    c, value = library.c, library.array(np.zeros(1, np.float32))
    inputs = Handle(library, "mlx_vector_array", c.mlx_vector_array_new_value(value.value))
    outputs = Handle(library, "mlx_vector_array", c.mlx_vector_array_new())
    names = Handle(library, "mlx_vector_string", c.mlx_vector_string_new_value(b"x"))
    config = Handle(library, "mlx_fast_metal_kernel_config", c.mlx_fast_metal_kernel_config_new())
    library.check(c.mlx_fast_metal_kernel_config_add_output_arg(config.value, [1], 1, 10))
    made = c.mlx_fast_metal_kernel_new(
        *(b"k", names.value, names.value, b"out[0] = 1;", b"", True, False)
    )
    kernel = Handle(library, "mlx_fast_metal_kernel", made)
    for used in (kernel.value, library.ffi.new("mlx_fast_metal_kernel*")[0]):
        status = c.mlx_fast_metal_kernel_apply(
            outputs.pointer, used, inputs.value, config.value, library.stream.value
        )
        text = "[metal_kernel] No Metal back-end." if used.ctx else "expected a non-empty"
        with pytest.raises(CError, match=re.escape(text)):
            library.check(status)


# The error handler


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

    with ThreadPoolExecutor(4) as pool:
        failing = [pool.submit(fail) for _ in range(4)]
        for _ in range(calls):
            library.install_handler()
    assert [one.result() for one in failing] == [None] * 4
    assert len(library.messages) - before == 4 * calls
    library.messages.clear()
