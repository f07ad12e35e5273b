"""The machine and the versions with which figures were measured."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

import mlx_h2o


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
