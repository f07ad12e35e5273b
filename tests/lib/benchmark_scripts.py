"""The scripts of benchmarks/ and tools/ as modules, for tests of what they compute."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from paths import ROOT


@contextmanager
def script(name: str, folder: str = "benchmarks") -> Iterator[ModuleType]:
    """``folder``/``name``.py as a module, which can import its neighbours within the context."""
    beside = str(ROOT / folder)
    sys.path.insert(0, beside)
    try:
        yield importlib.import_module(name)
    finally:
        sys.modules.pop(name, None)
        sys.path.remove(beside)
