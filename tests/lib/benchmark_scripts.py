"""The scripts of benchmarks/ and tools/ as modules, for tests of what they compute."""

import importlib.util
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
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", f"{beside}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]
        sys.path.remove(beside)
