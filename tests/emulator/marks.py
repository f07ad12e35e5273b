"""The marks of tests that run the Metal text on the emulator."""

import os

import pytest

from emulator.build import compiler

EMULATED = [
    pytest.mark.emulator,
    pytest.mark.skipif(
        compiler() is None and os.environ.get("CI") != "true",
        reason="no C++ compiler found (g++ or clang++)",
    ),
]
