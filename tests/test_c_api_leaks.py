"""A C++ program on the library: the last error of each thread, and nothing held at its end.

LeakSanitizer looks for what is lost where the library is built with ASan (`nox -s sanitize_c`).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import c_api
import c_api_build
from c_api_headers import INCLUDE, ROOT

FOLDER = ROOT / "tests" / "c_driver"


@pytest.fixture(scope="module")
def base() -> Path:
    c_api.required()
    path = c_api.library_path()
    assert path is not None
    return path.resolve()


@pytest.fixture(scope="module")
def sanitized(base: Path) -> bool:
    return b"__asan_init" in base.read_bytes()


@pytest.fixture(scope="module")
def driver(base: Path, sanitized: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("driver") / "driver"
    flags = ["-std=c++17", "-O1", "-g", *c_api_build.WARNINGS, f"-I{c_api_build.SOURCES}"]
    if sanitized:
        flags.append("-fsanitize=address,undefined")
    libraries = (f"-L{base.parent}", "-lmlxh2oc", "-pthread", f"-Wl,-rpath,{base.parent}")
    includes = (f"-I{path}" for path in INCLUDE)
    source = FOLDER / "driver.cpp"
    c_api_build.run(c_api_build.compiler(), *flags, *includes, source, "-o", program, *libraries)
    return program


def run(driver: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program by itself: what Python needs preloaded is not for it."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment |= {
        "ASAN_OPTIONS": "detect_leaks=1",
        "LSAN_OPTIONS": f"suppressions={FOLDER / 'lsan.supp'}:print_suppressions=0",
    }
    return subprocess.run(
        [driver, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_the_driver_calls_every_function() -> None:
    folder = ROOT / "mlx-c" / "h2o" / "include" / "mlx_h2o" / "c"
    declared = {
        name
        for header in folder.glob("*.h")
        for name in re.findall(r"^[\w ]+\*? ?(mlx_h2o_\w+)\(", header.read_text(), re.MULTILINE)
    }
    text = (FOLDER / "driver.cpp").read_text()
    called = set(re.findall(r"\bmlx_h2o_\w+", text))
    assert len(declared) > 15
    assert declared - called == set()


def test_nothing_is_lost(driver: Path) -> None:
    done = run(driver)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "no errors\n"


def test_a_lost_array_is_noticed(driver: Path, sanitized: bool) -> None:
    if not sanitized:
        pytest.skip("the library is not built with ASan")
    done = run(driver, "leak")
    assert done.returncode != 0
    assert "LeakSanitizer" in done.stderr and "mlx_array_new_data" in done.stderr
