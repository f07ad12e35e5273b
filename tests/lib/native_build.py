"""Whether the native extension can be built here, and if not, what is missing."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from programs import missing


def what_is_missing() -> str:
    """What is missing; empty if there are a compiler and Python's headers."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "no C++ compiler (Debian: g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "no Python.h (Debian: python3-dev)"
    return ""


def need() -> None:
    """Skip the calling test, with the reason, if the extension cannot be built; fail in CI."""
    if reason := what_is_missing():
        missing(reason)
