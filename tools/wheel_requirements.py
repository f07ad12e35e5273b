"""Install build requirements where MLX's wheels do not install: before-build of cibuildwheel.

MLX's wheels need glibc 2.35, and the newest image for x86-64 and aarch64 has 2.34. A build needs
only MLX's headers and a library to link against, so MLX goes into a directory of its own.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main(folder: str) -> None:
    """Install the build requirements, MLX under ``folder``."""
    wanted = tomllib.loads(PROJECT.read_text("utf-8"))["build-system"]["requires"]
    mlx = [line for line in wanted if line.startswith("mlx")]
    others = [line for line in wanted if not line.startswith("mlx")]
    install = (sys.executable, "-m", "pip", "install", "-q")
    subprocess.run((*install, *others, "cmake", "ninja"), check=True)
    shutil.rmtree(folder, ignore_errors=True)
    platform = f"manylinux_2_35_{os.uname().machine}"
    apart = ("--target", folder, "--platform", platform, "--only-binary=:all:")
    subprocess.run((*install, *apart, *mlx), check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
