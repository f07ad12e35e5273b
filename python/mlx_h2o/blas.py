"""Advice for Linux, where MLX's wheels compute with the reference BLAS unless another is loaded."""

import functools
import logging
import re
from pathlib import Path

import mlx.core as mx

_FAST = re.compile(r"(openblas|mkl|blis|atlas|flexiblas|armpl)[^/\n]*(/[^/\n]*)?\.so", re.I)


def slow_blas(maps: Path = Path("/proc/self/maps")) -> str:
    """A line of advice if MLX computes on the CPU with the reference BLAS of its Linux wheels;
    otherwise empty. Looks at the libraries that this process has loaded."""
    loaded = maps.read_text() if maps.exists() else ""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if not on_cpu or not re.search(r"/libc?blas[-.]", loaded) or _FAST.search(loaded):
        return ""
    return (
        "MLX computes with the reference BLAS, many times slower than OpenBLAS: install it "
        "(Debian: libopenblas0-pthread) and preload it, "
        "LD_PRELOAD=$(ls /usr/lib/*/openblas-pthread/libopenblas.so.0)"
    )


@functools.cache
def say_slow_blas() -> None:
    """Log that advice, once."""
    if advice := slow_blas():
        logging.getLogger("mlx_h2o").warning(advice)
