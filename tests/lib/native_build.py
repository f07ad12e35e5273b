"""Whether the native extension can be built here, and if not, what is missing."""

import shutil
import sysconfig
from pathlib import Path

from programs import missing


def need() -> None:
    """Skip the calling test, with the reason, if the extension cannot be built; fail in CI."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        missing("no C++ compiler (Debian: g++)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing("no Python.h (Debian: python3-dev)")
