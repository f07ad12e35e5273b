"""The extension ``mlx_h2o._core``: whether it is installed and fits this process, and how many
threads it uses."""

import functools
import importlib
import re
from types import ModuleType

import mlx.core as mx

from mlx_h2o.operations.arguments import whole

# Not in the stubs of mlx.core.
_MLX_VERSION = str(vars(mx)["__version__"])
_MOST_THREADS = 256


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:3])


def fault_of(module: ModuleType) -> str:
    """Why an extension that could be imported does not fit this process; empty if it fits.

    Releases of MLX differ in the layout of an array even within one minor version (0.32.3 and
    0.32.4 do): an extension built for another could crash, so this check comes before other calls.
    """
    built_for = str(module.built_for_mlx)
    if _release(built_for) != _release(_MLX_VERSION):
        return f"the extension was built for MLX {built_for}, found MLX {_MLX_VERSION}"
    try:
        module.committed_bytes(mx.zeros(()))  # any function of an array
    except TypeError:
        return (
            "the extension does not know mlx.core.array: it was built with another version of "
            "nanobind than MLX"
        )
    try:
        module.simd_target()
        module.threads()
    except ValueError as error:  # MLX_H2O_SIMD, MLX_H2O_THREADS
        return str(error)
    return ""


@functools.cache
def extension() -> tuple[ModuleType | None, str]:
    """The extension, or None and why it is not installed or does not fit."""
    try:
        module = importlib.import_module("mlx_h2o._core")
    except ModuleNotFoundError:
        return None, "the extension mlx_h2o._core is not installed"
    except ImportError as error:
        return None, f"the extension mlx_h2o._core cannot be loaded: {error}"
    fault = fault_of(module)
    return (None, fault) if fault else (module, "")


def advice() -> str:
    """How to make it available; empty if ``unavailable_reason`` says everything."""
    if "is not installed" in extension()[1]:
        return "install the Linux wheel, or the sources with g++ and Python's headers"
    built_for = re.search(r"built for MLX (\d+\.\d+\.\d+)", extension()[1])
    return f"pip install 'mlx[cpu]=={built_for[1]}'" if built_for else ""


def unavailable_reason() -> str:
    """Empty if the extension is installed and fits the MLX of this process."""
    return extension()[1]


def threads() -> int:
    """Number of threads that an operation of the native back end may use, including the caller's.

    This is the number given to ``set_threads``, else the environment variable MLX_H2O_THREADS, else
    the processors available to this process. It is 1 without a native back end.
    """
    module = extension()[0]
    return 1 if module is None else int(module.threads())


def set_threads(count: int | None) -> None:
    """Set the number of threads of the native back end for the whole process.

    It applies from the next operation on; None restores the default (see ``threads``). Results are
    the same for any number, bit for bit. Without a native back end it has no effect.

    Raises:
        ValueError: not 1 to 256.
        TypeError: neither an integer nor None.
    """
    if count is not None:
        count = whole("set_threads", "count", count)
        if not 1 <= count <= _MOST_THREADS:
            raise ValueError(f"[set_threads] count is {count}, expected 1 to {_MOST_THREADS}.")
    module = extension()[0]
    if module is not None:
        module.set_threads(count or 0)
