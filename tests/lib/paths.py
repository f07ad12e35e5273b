"""Paths, and the import path with which a child process finds modules of tests/."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
BENCHMARKS = ROOT / "benchmarks"
IMPORTS = f"{TESTS}{os.pathsep}{TESTS / 'lib'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
