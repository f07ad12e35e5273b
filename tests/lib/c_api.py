"""The C library from Python: cffi in ABI mode, on the declarations of the headers themselves.

The library is named by the environment variable MLX_H2O_C_LIBRARY, or is the newest
libmlxh2oc.so under build/. Values cross as NumPy arrays, never as handles of mlx.core.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import cffi
import mlx.core as mx
import numpy as np

from c_api_headers import ROOT, declarations

ENVIRONMENT = "MLX_H2O_C_LIBRARY"

#: Operations of parity cases that the C interface has; it has no cache, so no traces.
OPERATIONS = ("attention", "keep")

# In the order of mlx_dtype; bfloat16 has no NumPy type and travels as its bits.
DTYPES = (
    ("bool", "bool"),
    ("uint8", "uint8"),
    ("uint16", "uint16"),
    ("uint32", "uint32"),
    ("uint64", "uint64"),
    ("int8", "int8"),
    ("int16", "int16"),
    ("int32", "int32"),
    ("int64", "int64"),
    ("float16", "uint16"),
    ("float32", "float32"),
    ("float64", "float64"),
    ("bfloat16", "uint16"),
    ("complex64", "complex64"),
)
CODES = {name: code for code, (name, _) in enumerate(DTYPES)}


_FFI = cffi.FFI()

# What the error handler received. One list and one handler that lives as long as the process: a
# library that tests link over another one shares that one's handler.
_messages: list[str] = []


@_FFI.callback("void(const char*, void*)")
def _receive(message: Any, _data: Any) -> None:
    _messages.append(_FFI.string(message).decode())


class CError(ValueError):
    """A function returned a status other than 0; the text is what the error handler received."""


def library_path() -> Path | None:
    """The library to test, or None where there is none."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named)
    built = sorted(ROOT.glob("build/**/libmlxh2oc.*"), key=lambda path: path.stat().st_mtime)
    return built[-1] if built else None


class Handle:
    """An owned mlx-c handle; ``value`` is the struct, ``pointer`` the place for a result."""

    def __init__(self, library: Library, kind: str, value: Any = None) -> None:
        self.pointer = library.ffi.new(f"{kind}*")
        if value is not None:
            self.pointer[0] = value
        self._free = getattr(library.c, f"{kind}_free")

    @property
    def value(self) -> Any:
        return self.pointer[0]

    def __del__(self) -> None:
        if self.pointer[0].ctx:
            self._free(self.pointer[0])


class Library:
    """A loaded libmlxh2oc; errors of its functions become CError."""

    def __init__(self, path: Path) -> None:
        self.ffi = cffi.FFI()
        self.ffi.cdef(declarations())
        self.c: Any = self.ffi.dlopen(str(path))
        self.messages = _messages
        self.install_handler()
        self.nothing = self.ffi.new("mlx_array*")[0]
        self.stream = Handle(self, "mlx_stream", self.c.mlx_default_cpu_stream_new())

    def install_handler(self) -> None:
        """Collect messages in ``messages`` (again, after a test installed its own handler)."""
        address = int(_FFI.cast("intptr_t", _receive))
        handler = self.ffi.cast("mlx_error_handler_func", address)
        self.c.mlx_set_error_handler(handler, self.ffi.NULL, self.ffi.NULL)

    def check(self, status: int) -> None:
        """Raise CError with the messages since the last call, unless the status is 0."""
        text = "; ".join(self.messages)
        self.messages.clear()
        if status:
            raise CError(text)
        assert not text, f"success, yet the handler received: {text}"

    def array(self, values: Any, dtype: str | None = None) -> Handle:
        """A C array of the values of an mlx.core or NumPy array; ``dtype`` converts NumPy's."""
        if isinstance(values, mx.array):
            dtype = str(values.dtype).removeprefix("mlx.core.")
            bits = values.view(mx.uint16) if dtype in ("float16", "bfloat16") else values
            data = np.array(bits)
        else:
            data = np.asarray(values)
            dtype = dtype or str(data.dtype)
            if dtype == "float16":
                data = data.astype(np.float16).view(np.uint16)
            else:
                data = data.astype(DTYPES[CODES[dtype]][1])
        data = np.ascontiguousarray(data).reshape(data.shape)
        handle = Handle(self, "mlx_array")
        handle.pointer[0] = self.c.mlx_array_new_data(
            self.ffi.from_buffer(data), list(data.shape), data.ndim, CODES[dtype]
        )
        self.check(not handle.value.ctx)
        return handle

    def numpy(self, handle: Handle) -> np.ndarray:
        """The values; bfloat16 as float32."""
        row_major = Handle(self, "mlx_array")
        name = DTYPES[self.c.mlx_array_dtype(handle.value)][0]
        if name == "bfloat16":
            name = "float32"
            arguments = (row_major.pointer, handle.value, CODES[name], self.stream.value)
            self.check(self.c.mlx_astype(*arguments))
        else:
            self.check(self.c.mlx_array_set(row_major.pointer, handle.value))
        self.check(
            self.c.mlx_contiguous(row_major.pointer, row_major.value, False, self.stream.value)
        )
        self.check(self.c.mlx_array_eval(row_major.value))
        ndim = self.c.mlx_array_ndim(row_major.value)
        shape = [self.c.mlx_array_dim(row_major.value, axis) for axis in range(ndim)]
        stored = DTYPES[CODES[name]][1]
        pointer = getattr(self.c, f"mlx_array_data_{stored}")(row_major.value)
        self.check(pointer == self.ffi.NULL)
        buffer = self.ffi.buffer(pointer, self.c.mlx_array_nbytes(row_major.value))
        return np.frombuffer(buffer, stored).view(name).reshape(shape).copy()

    def first_rows(self, handle: Handle, rows: int) -> Handle:
        """[:, :, :rows] of a four-dimensional array, as a strided view."""
        shape = [self.c.mlx_array_dim(handle.value, axis) for axis in range(4)]
        view = Handle(self, "mlx_array")
        bounds = ([0] * 4, 4, [*shape[:2], rows, shape[3]], 4, [1] * 4, 4)
        self.check(self.c.mlx_slice(view.pointer, handle.value, *bounds, self.stream.value))
        return view

    @contextlib.contextmanager
    def using(self, backend: str) -> Iterator[None]:
        """Name the back end of this thread's calls; "" is the automatic choice."""
        self.check(self.c.mlx_h2o_set_backend(backend.encode()))
        try:
            yield
        finally:
            self.check(self.c.mlx_h2o_set_backend(self.ffi.NULL))

    def backend_status(self, name: str) -> tuple[bool, str]:
        """Whether the back end is available, and why not."""
        available = self.ffi.new("bool*")
        reason = Handle(self, "mlx_string", self.c.mlx_string_new())
        self.check(self.c.mlx_h2o_backend_status(name.encode(), available, reason.pointer))
        return available[0], self.ffi.string(self.c.mlx_string_data(reason.value)).decode()

    def attention(
        self,
        queries: Handle,
        keys: Handle,
        values: Handle,
        *,
        scale: float,
        mask: Handle | str | None = None,
        sinks: Handle | None = None,
        row_bias: Handle | None = None,
        return_lse: bool = True,
    ) -> dict[str, Handle]:
        """Attention with scores; the mask is None, "causal" or an array."""
        names = ("out", "scores", "lse") if return_lse else ("out", "scores")
        results = {name: Handle(self, "mlx_array") for name in names}
        mode = "" if mask is None else mask if isinstance(mask, str) else "array"
        self.check(
            self.c.mlx_h2o_scaled_dot_product_attention_with_scores(
                results["out"].pointer,
                results["scores"].pointer,
                results["lse"].pointer if return_lse else self.ffi.NULL,
                queries.value,
                keys.value,
                values.value,
                scale,
                mode.encode(),
                mask.value if isinstance(mask, Handle) else self.nothing,
                self.nothing if sinks is None else sinks.value,
                self.nothing if row_bias is None else row_bias.value,
                self.stream.value,
            )
        )
        return results

    def keep_indices(
        self,
        scores: Handle,
        positions: Handle,
        keep: int,
        sink_size: int = 0,
        recent_start: int | Handle | None = None,
    ) -> Handle:
        result = Handle(self, "mlx_array")
        start = self.of_sequences(recent_start)
        place, rows = result.pointer, (scores.value, positions.value)
        zones = (sink_size, start.value)
        self.check(self.c.mlx_h2o_keep_indices(place, *rows, keep, *zones, self.stream.value))
        return result

    def of_sequences(self, value: int | Handle | None) -> Handle:
        """A number for all sequences as int32 [], or what is an array or nothing already."""
        if value is None:
            return Handle(self, "mlx_array")
        return value if isinstance(value, Handle) else self.array(np.array(value, np.int32))

    def run_case(self, case: dict[str, Any], tensors: dict[str, Any]) -> dict[str, np.ndarray]:
        """Run one parity case of an operation in OPERATIONS.

        ``tensors`` has the case's inputs by their names; the result has its outputs by theirs,
        floats as float32. An error of the library raises CError.
        """
        inputs = {name: self.array(values) for name, values in tensors.items()}
        if case["op"] == "keep":
            zones = (case["sink_size"], inputs.get("recent_start", case["recent_start"]))
            rows = (inputs["scores"], inputs["positions"])
            return {"keep": self.numpy(self.keep_indices(*rows, case["keep"], *zones))}
        if case["op"] != "attention":
            raise NotImplementedError(f"the C interface has no {case['op']}")
        slack = case.get("slack", 0)
        if slack:
            rows = self.c.mlx_array_dim(inputs["keys"].value, 2) - slack
            for name in ("keys", "values"):
                inputs[name] = self.first_rows(inputs[name], rows)
        results = self.attention(
            inputs["queries"],
            inputs["keys"],
            inputs["values"],
            scale=case["scale"],
            mask=inputs["mask"] if case["mask"] == "array" else case["mask"] or None,
            sinks=inputs.get("sinks"),
            row_bias=inputs.get("row_bias"),
            return_lse=case["return_lse"],
        )
        return {name: self.numpy(a).astype(np.float32) for name, a in results.items()}


@functools.cache
def load(path: Path | None = None) -> Library | None:
    """The library under test, or None where it is not built."""
    path = path or library_path()
    return None if path is None else Library(path)


def missing(reason: str) -> NoReturn:
    """Skip a test for want of something; in CI it fails."""
    import pytest  # the parity runner does without

    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def required() -> Library:
    """The library under test, for fixtures: without it tests are skipped, and fail in CI."""
    library = load()
    if library is None:
        missing(f"libmlxh2oc is not built (docs/internals/c-api.md), and {ENVIRONMENT} names none")
    return library


def run_case(case: dict[str, Any], tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """``Library.run_case`` of the library under test."""
    library = load()
    if library is None:
        raise RuntimeError(f"libmlxh2oc is not built; set {ENVIRONMENT}")
    return library.run_case(case, tensors)


BACKENDS = ("composed", "native")


def named(library: Library, backend: str):
    """Name a back end of this build; one that it lacks skips the test, or fails it in CI."""
    available, reason = library.backend_status(backend)
    if not available:
        missing(reason)
    return library.using(backend)
