"""Which BLAS MLX's CPU back end computes with: Linux wheels bring the reference one."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx

__all__ = ["fast_library", "hint", "only_reference"]

_ANY = re.compile(r"/lib(blas|cblas)[-.]")
_FAST = re.compile(r"openblas|mkl|blis|atlas|flexiblas|armpl", re.IGNORECASE)

_DEBIAN = "/usr/lib/*/openblas-pthread/libopenblas.so.0"


def hint() -> str | None:
    """What helps, as a line, where MLX computes on the CPU with the reference BLAS; else None.

    OpenBLAS multiplies matrices 40 to 100 times as fast. Looks at what this process has loaded,
    computes nothing.
    """
    maps = Path("/proc/self/maps")
    if mx.default_device().type != mx.DeviceType.cpu or not maps.exists():
        return None
    if not only_reference(maps.read_text()):
        return None
    found = fast_library()
    get = "" if found else "install OpenBLAS (Debian: libopenblas0-pthread) and "
    return (
        "MLX computes with the reference BLAS, many times slower than OpenBLAS: "
        f"{get}start this with LD_PRELOAD={found or _DEBIAN}"
    )


def only_reference(maps: str) -> bool:
    """Whether the libraries of a process, as /proc/PID/maps lists them, have a BLAS, but none that
    is known to be fast."""
    files = {line[line.index("/") :] for line in maps.splitlines() if "/" in line}
    libraries = ["/".join(Path(file).parts[-2:]) for file in files if ".so" in file]
    return any(map(_ANY.search, libraries)) and not any(map(_FAST.search, libraries))


def fast_library() -> str | None:
    """Debian's OpenBLAS, to be preloaded, or None where it is not installed."""
    pattern = Path(_DEBIAN)
    return next((str(each) for each in Path("/").glob(str(pattern.relative_to("/")))), None)
