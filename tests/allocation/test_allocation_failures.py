"""Memory that runs out in native code: an error is raised, and the next generation works again."""

import sys
from pathlib import Path

import pytest

import c_api
import c_api_build
from back_ends import NATIVE
from made_once import made_once
from paths import IMPORTS
from programs import run

FOLDER = Path(__file__).parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="preloads a library, as glibc does")


def short_of_memory(factory: pytest.TempPathFactory, script: str, *arguments: str) -> list[str]:
    """The lines that a script writes whose memory runs out."""

    def make(folder: Path) -> None:
        flags = ("-std=gnu11", "-O1", "-shared", "-fPIC", *c_api_build.WARNINGS)
        source, target = FOLDER / "failing_malloc.c", folder / "failing_malloc.so"
        run(c_api_build.compiler("c"), *flags, source, "-o", target)

    library = made_once(factory, "failing_malloc", make) / "failing_malloc.so"
    own = {"LD_PRELOAD": str(library), "PYTHONPATH": IMPORTS}
    command = sys.executable, FOLDER / script, *arguments
    return run(*command, environment=own, timeout=120).splitlines()


@NATIVE
def test_a_generation_that_gets_no_memory_ends_with_an_error(tmp_path_factory):
    policies = ("h2o-ema", "h2o")
    lines = short_of_memory(tmp_path_factory, "generation.py", *policies)
    found = {policy: int(arrays) for policy, arrays in map(str.split, lines)}
    assert tuple(found) == policies and min(found.values()) > 4


def test_a_call_of_c_that_gets_no_memory_has_a_status_and_a_message(tmp_path_factory):
    c_api.required()
    (line,) = short_of_memory(tmp_path_factory, "c_calls.py")
    assert int(line.split()[1]) >= 3
