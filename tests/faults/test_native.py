"""Faults in the native kernels, each of which the native test driver must catch: those of this
machine, and those of NEON, built for AArch64 and run under QEMU.

Only the kernels that read the changed file are compiled again.
"""

import os
import shutil
from pathlib import Path

import pytest

from faults.driver import Toolchain
from faults.text import table
from made_once import made_once

COMPILER = os.environ.get("CXX") or next(
    filter(shutil.which, ("c++", "g++", "clang++")), "no compiler"
)
TOOLS = {
    # The portable code alone: the same text for vectors takes the compiler four times as long.
    "native": Toolchain(
        COMPILER, flags=("-DMLX_H2O_SCALAR",), reached=r"(?!attention_(avx2|avx512|neon))\w+"
    ),
    "neon": Toolchain(
        "aarch64-linux-gnu-g++",
        ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"),
        # QEMU 7.2 stops at an assertion of its own where a child of a process with threads starts
        # one.
        ("-DMLX_H2O_TEST_FORK=0",),
        cases="120",
        reached="attention_neon_kernel",
    ),
}
FAULTS = table("native")


def objects(kind: str, factory: pytest.TempPathFactory) -> Path:
    """Results of the unchanged kernels."""
    tools = TOOLS[kind]
    if missing := [
        name for name in (tools.compiler, *tools.emulator[:1]) if not shutil.which(name)
    ]:
        pytest.skip(f"{' and '.join(missing)} not found")
    return made_once(factory, kind, tools.compile_all)


@pytest.mark.parametrize("kind", TOOLS)
def test_the_unchanged_kernels_pass(
    kind: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    units = sorted(objects(kind, tmp_path_factory).glob("*.o"))
    found = TOOLS[kind].complaint(units, tmp_path / "unchanged", "\0")
    assert found.startswith("status 0:"), found


@pytest.mark.parametrize(("kernels", "name"), [(k, name) for k in FAULTS for name in FAULTS[k]])
def test_a_fault_is_caught(
    kernels: str, name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    kind = "neon" if kernels == "neon" else "native"
    built = objects(kind, tmp_path_factory)
    TOOLS[kind].assert_caught(built, tmp_path, FAULTS[kernels][name])
