"""Where things are, and what modules of tests/ are found by in a child process."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
BENCHMARKS = ROOT / "benchmarks"
IMPORTS = f"{TESTS}{os.pathsep}{TESTS / 'lib'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
