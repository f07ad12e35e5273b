"""The C library from Python: cffi in ABI mode, on the declarations of the headers themselves.

The library is named by the environment variable MLX_H2O_C_LIBRARY, or is the newest
libmlxh2oc.so under build/. Values cross as NumPy arrays, never as handles of mlx.core.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cffi
import mlx.core as mx
import numpy as np

from c_api_headers import ROOT, declarations
from programs import missing

ENVIRONMENT = "MLX_H2O_C_LIBRARY"
ATTENTION = "scaled_dot_product_attention_with_scores"
QUANTIZED = "scaled_dot_product_attention_quantized_with_scores"

# In the order of mlx_dtype.
DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16"),
    *("float32", "float64", "bfloat16", "complex64"),
)
CODES = {name: code for code, name in enumerate(DTYPES)}

DEFAULTS = {
    "mask": None, "kind": "ema", "decay": 0.95, "masked": True, "counted_queries": 128,
    "bits": 8, "group_size": 64, "sparse_v_threshold": 0.0, "sink_size": 0, "share": 1.0,
}  # fmt: skip
"""The C types of arguments that are neither arrays nor optional."""

_FFI = cffi.FFI()

# What the error handler received. One list and one handler for the whole process, because a library
# that tests link over another one shares its handler.
_messages: list[str] = []


@_FFI.callback("void(const char*, void*)")
def _receive(message: Any, _data: Any) -> None:
    _messages.append(_FFI.string(message).decode())


class CError(ValueError):
    """A function returned a status other than 0; the text is what the error handler received."""


def library_path(build: Path | None = None) -> Path | None:
    """The library to test, or None if there is none; ``build`` is the folder to look in."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named)
    found = (build or ROOT / "build").glob("**/libmlxh2oc.*")
    built = sorted(found, key=lambda path: path.stat().st_mtime)
    return built[-1] if built else None


@functools.cache
def parameters() -> dict[str, list[tuple[str, str]]]:
    """Type and name of each parameter, for our functions that return a status, from the headers."""
    text = " ".join(re.sub(r"/\*.*?\*/", "", declarations(), flags=re.DOTALL).split())
    found = {}
    for name, given in re.findall(r"int (mlx_h2o_\w+)\(([^)]*)\);", text):
        pairs = (re.fullmatch(r"(.*[ *])(\w+)", one.strip()) for one in given.split(","))
        found[name] = [(pair[1].replace("const", "").strip(), pair[2]) for pair in pairs if pair]
    return found


class Handle:
    """An owned mlx-c handle; ``value`` is the struct, ``pointer`` is where to put a result."""

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
        self.path, self.ffi = path, cffi.FFI()
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
        """A C array of the values of an mlx.core or NumPy array; ``dtype`` converts NumPy's. An MLX
        view stays a view, strides included."""
        if isinstance(values, mx.array):
            dtype = str(values.dtype).removeprefix("mlx.core.")
            data = np.asarray(values.view(mx.uint16) if values.dtype == mx.bfloat16 else values)
        else:
            data = np.asarray(values)
            dtype = dtype or str(data.dtype)
            data = np.array(data.astype(dtype))
        steps = [step // data.itemsize for step in data.strides]
        places = [(count - 1) * step for count, step in zip(data.shape, steps, strict=True)]
        if data.size == 0 or data.flags.c_contiguous or min(places) < 0:
            return self._copied(np.array(data, order="C"), dtype)
        memory = np.lib.stride_tricks.as_strided(data, (sum(places) + 1,), (data.itemsize,))
        view, whole = Handle(self, "mlx_array"), self._copied(np.array(memory), dtype)
        layout = (list(data.shape), data.ndim, steps, data.ndim, 0)
        self.check(self.c.mlx_as_strided(view.pointer, whole.value, *layout, self.stream.value))
        return view

    def _copied(self, data: np.ndarray, dtype: str) -> Handle:
        handle, memory = Handle(self, "mlx_array"), self.ffi.from_buffer(data)
        handle.pointer[0] = self.c.mlx_array_new_data(
            memory, list(data.shape), data.ndim, CODES[dtype]
        )
        self.check(not handle.value.ctx)
        return handle

    def mlx(self, handle: Handle) -> mx.array:
        """The values, as an array of this process's MLX."""
        row_major = Handle(self, "mlx_array")
        stream = self.stream.value
        self.check(self.c.mlx_contiguous(row_major.pointer, handle.value, False, stream))
        self.check(self.c.mlx_array_eval(row_major.value))
        ndim = self.c.mlx_array_ndim(row_major.value)
        shape = [self.c.mlx_array_dim(row_major.value, axis) for axis in range(ndim)]
        name = DTYPES[self.c.mlx_array_dtype(row_major.value)]
        stored = "uint16" if name in ("float16", "bfloat16") else name
        pointer = getattr(self.c, f"mlx_array_data_{stored}")(row_major.value)
        self.check(pointer == self.ffi.NULL)
        buffer = self.ffi.buffer(pointer, self.c.mlx_array_nbytes(row_major.value))
        found = mx.array(np.frombuffer(buffer, stored).reshape(shape))
        return found if stored == name else found.view(getattr(mx, name))

    def numpy(self, handle: Handle) -> np.ndarray:
        """The values; bfloat16 as float32."""
        found = self.mlx(handle)
        return np.array(found.astype(mx.float32) if found.dtype == mx.bfloat16 else found)

    @contextlib.contextmanager
    def using(self, backend: str) -> Iterator[None]:
        """Select the back end for this thread's calls; "" is the automatic choice."""
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

    def call(self, op: str, *, without: Sequence[str] = (), **given: Any) -> dict[str, Any]:
        """Call ``mlx_h2o_`` + ``op`` with arguments named as in the header; results by name.

        Arrays are handles, or what ``array`` takes; rows are arrays or tuples; a mask is None,
        "causal" or an array, under "mask". Results named in ``without`` are not requested.
        """
        results: dict[str, Handle] = {}
        held = {name: self._handles(value) for name, value in given.items()}
        mask = held.pop("mask", None)
        mode = "" if mask is None else mask if isinstance(mask, str) else "array"
        held = {"mask_mode": mode, "mask_arr": mask if mode == "array" else None} | held
        arguments: list[Any] = []
        for kind, name in parameters()[f"mlx_h2o_{op}"]:
            value = held.get(name, DEFAULTS.get(name))
            if kind.endswith("*") and kind.startswith("mlx_"):
                asked = name not in without
                if asked:
                    new = getattr(self.c, f"{kind[:-1]}_new")()
                    results[name] = Handle(self, kind[:-1], new)
                arguments.append(results[name].pointer if asked else self.ffi.NULL)
            elif kind == "mlx_array":
                arguments.append(self.nothing if value is None else value.value)
            elif kind == "mlx_vector_array":
                held[name] = vector = self.vector(value)  # lives until the call
                arguments.append(vector.value)
            elif kind == "mlx_optional_int":
                arguments.append({"value": value or 0, "has_value": value is not None})
            elif kind == "char*":
                arguments.append(value.encode())
            else:
                arguments.append((value or self.stream).value if kind == "mlx_stream" else value)
        self.check(getattr(self.c, f"mlx_h2o_{op}")(*arguments))
        return {
            name: self.items(one) if kind == "mlx_vector_array*" else one
            for kind, name in parameters()[f"mlx_h2o_{op}"]
            if (one := results.get(name)) is not None
        }

    def _handles(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._handles, value))
        return self.array(value) if isinstance(value, mx.array | np.ndarray) else value

    def vector(self, rows: Handle | tuple[Handle, ...]) -> Handle:
        handle = Handle(self, "mlx_vector_array", self.c.mlx_vector_array_new())
        for part in rows if isinstance(rows, tuple) else (rows,):
            self.check(self.c.mlx_vector_array_append_value(handle.value, part.value))
        return handle

    def items(self, vector: Handle) -> tuple[Handle, ...]:
        count = self.c.mlx_vector_array_size(vector.value)
        found = tuple(Handle(self, "mlx_array") for _ in range(count))
        for index, item in enumerate(found):
            self.check(self.c.mlx_vector_array_get(item.pointer, vector.value, index))
        return found

    def attention(self, queries: Any, keys: Any, values: Any, **given: Any) -> dict[str, Handle]:
        """Attention with scores, and lse."""
        rows = {"queries": queries, "keys": keys, "values": values}
        return self.call(ATTENTION, **rows, **given)

    def keep_indices(self, scores: Any, positions: Any, keep: int, **zones: Any) -> Handle:
        rows = {"scores": scores, "positions": positions, "keep": keep}
        return self.call("keep_indices", **rows, **zones)["res"]


@functools.cache
def load(path: Path | None = None) -> Library | None:
    """The library under test, or None if it is not built."""
    path = path or library_path()
    return None if path is None else Library(path)


def required() -> Library:
    """The library under test, for fixtures: without it tests are skipped, and fail in CI."""
    library = load()
    if library is None:
        missing(f"libmlxh2oc is not built (docs/internals/c-api.md), and {ENVIRONMENT} names none")
    return library


BACKENDS = ("composed", "native")


def named(library: Library, backend: str):
    """Select a back end; if the build lacks it, the test is skipped, or fails in CI."""
    available, reason = library.backend_status(backend)
    if not available:
        missing(reason)
    return library.using(backend)
