"""A C++ program on the library: the last error of each thread, and no leaks at its end.

LeakSanitizer checks it, with ASan and UBSan if they are in the library (`nox -s sanitize_c`).
Nothing is suppressed: neither MLX nor the C++ library leaks.
"""

import re
import subprocess
from pathlib import Path

import pytest

import c_api
import c_api_build
from c_api_headers import INCLUDE, functions
from paths import TESTS
from programs import ended

SOURCES = [TESTS / "languages" / "c_driver" / "driver.cpp", TESTS / "fuzz" / "c_api.cpp"]
CORPUS = TESTS / "fuzz" / "corpus"


@pytest.fixture(scope="module")
def base() -> Path:
    return c_api.required().path.resolve()


@pytest.fixture(scope="module")
def driver(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("driver") / "driver"
    in_the_library = b"__asan_init" in base.read_bytes()
    sanitizers = "address,undefined" if in_the_library else "leak"
    c_api_build.run(
        *(c_api_build.compiler(), "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizers}"),
        *(*c_api_build.WARNINGS, f"-I{c_api_build.SOURCES}", *(f"-I{path}" for path in INCLUDE)),
        *(*SOURCES, "-o", program, f"-L{base.parent}", "-lmlxh2oc", "-pthread"),
        f"-Wl,-rpath,{base.parent}",
    )
    return program


def run(driver: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program by itself: what Python needs preloaded is not for it."""
    options = "detect_leaks=1:fast_unwind_on_malloc=0"
    own = {"LD_PRELOAD": "", "ASAN_OPTIONS": options, "LSAN_OPTIONS": options}
    return ended(driver, CORPUS, *arguments, environment=own)


def test_the_driver_calls_every_function() -> None:
    declared = {name for name in functions() if name.startswith("mlx_h2o_")}
    called = {name for file in SOURCES for name in re.findall(r"\bmlx_h2o_\w+", file.read_text())}
    assert len(declared) > 15
    assert declared - called == set()


@pytest.mark.slow
def test_nothing_is_lost(driver: Path) -> None:
    done = run(driver)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "no errors\n"


@pytest.mark.slow
def test_a_lost_array_is_noticed(driver: Path) -> None:
    done = run(driver, "leak")
    assert done.returncode != 0
    assert "LeakSanitizer" in done.stderr and "mlx_array_new_data" in done.stderr
