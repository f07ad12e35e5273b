"""The machine and the versions behind measured figures."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import mlx_h2o

__all__ = ["blas", "environment", "environment_line"]


def environment() -> dict[str, str]:
    """The machine and the versions, by name."""
    default = next((name for name, status in mlx_h2o.backends().items() if status.default), "none")
    return {
        "machine": _processor(),
        "cores": str(os.cpu_count()),
        "system": platform.system() + " " + platform.machine(),
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "mlx_h2o": mlx_h2o.__version__,
        "backend": default,
    }


def environment_line() -> str:
    """The same, as one line."""
    e = environment()
    return (
        f"{e['machine']}, {e['cores']} cores, {e['system']}, Python {e['python']}, MLX {e['mlx']}, "
        f"mlx-lm {e['mlx_lm']}, mlx-h2o {e['mlx_h2o']}, back end {e['backend']}."
    )


def blas() -> str:
    """The library that was preloaded, without its folder, or that MLX brings none."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    return Path(preloaded).name if preloaded else "MLX's own"


def _processor() -> str:
    """The processor's name: `platform.processor()` is empty on most Linux systems."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
