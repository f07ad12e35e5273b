"""The machine and the versions with which figures were measured."""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

import mlx_h2o

_FAST = re.compile(r"(openblas|mkl|blis|atlas|flexiblas|armpl)[^/\n]*(/[^/\n]*)?\.so", re.I)


def environment() -> dict[str, str]:
    """The machine and the versions, by name."""
    default = next((name for name, status in mlx_h2o.backends().items() if status.default), "none")
    return {
        "machine": str(mx.device_info(mx.cpu).get("device_name", platform.machine())),
        "cores": str(os.cpu_count()),
        "system": platform.system() + " " + platform.machine(),
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "mlx_h2o": mlx_h2o.__version__,
        "backend": default,
        "blas": Path(os.environ.get("LD_PRELOAD", "")).name or "MLX's own",  # what is preloaded
    }


def environment_line(found: dict[str, str]) -> str:
    """An environment in one line, without our own version. Earlier results do not have the BLAS."""
    said = "{machine}, {cores} cores, {system}, Python {python}, MLX {mlx}, mlx-lm {mlx_lm}, "
    said = (said + "back end {backend}, BLAS: {blas}").format(**{"blas": ""} | found)
    return said.removesuffix(", BLAS: ")


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
