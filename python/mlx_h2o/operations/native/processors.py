"""How many threads the native back end uses."""

from __future__ import annotations

from mlx_h2o.operations import arguments
from mlx_h2o.operations.native import module as native_module

_MOST = 256


def threads() -> int:
    """Threads that one operation of the native back end may use, the calling one included.

    What ``set_threads`` said, else the environment variable MLX_H2O_THREADS, else the processors
    that this process may use. 1 where there is no native back end.
    """
    module = native_module.module_or_none()
    return 1 if module is None else int(module.threads())


def set_threads(count: int | None) -> None:
    """Set the number of threads of the native back end, for the whole process.

    From the next operation that runs on; None returns to the default (``threads``). Any number
    gives the same results, bit for bit. Without a native back end it has no effect.

    Raises:
        ValueError: not 1 to 256.
        TypeError: neither an integer nor None.
    """
    if count is not None:
        count = arguments.whole("set_threads", "count", count)
        if not 1 <= count <= _MOST:
            raise ValueError(f"[set_threads] count is {count}, expected 1 to {_MOST}.")
    module = native_module.module_or_none()
    if module is not None:
        module.set_threads(count or 0)
