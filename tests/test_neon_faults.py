"""Faults seeded into NEON, built for AArch64 and run under QEMU."""

import shutil
from pathlib import Path

import pytest

from native_driver import Toolchain

TOOLS = Toolchain(
    "aarch64-linux-gnu-g++",
    ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"),
    # QEMU 7.2 stops at an assertion of its own where a child of a process with threads starts one.
    ("-DMLX_H2O_TEST_FORK=0",),
)
CASES = "40"

# name: (file, text, its replacement, what the driver must complain about)
FAULTS = {
    "the upper half of eight bytes is the lower": (
        "simd_neon.h",
        "vmovl_u16(vget_high_u16(wide))",
        "vmovl_u16(vget_low_u16(wide))",
        "of target neon",
    ),
    "half bytes are shifted the other way": (
        "simd_neon.h",
        "vdupq_n_s32(-4 * i)",
        "vdupq_n_s32(4 * i)",
        "of target neon",
    ),
    "every fourth key takes no part": (
        "simd_neon.h",
        "vbicq_u32(bit, vcltq_f32(x, limit)))",
        "vbicq_u32(bit, vcltq_f32(x, limit))) & 7u",
        "out of target neon",
    ),
    "a value without weight takes part": (
        "simd_neon.h",
        "vceqzq_f32(weight)",
        "vceqzq_f32(value)",
        "out of target neon",
    ),
}

pytestmark = pytest.mark.skipif(
    shutil.which(TOOLS.compiler) is None or shutil.which(TOOLS.emulator[0]) is None,
    reason="no AArch64 cross compiler or no QEMU",
)


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> dict[str, Path]:
    return TOOLS.compile_all(tmp_path_factory.mktemp("neon"))


def test_the_unchanged_kernels_pass(objects, tmp_path):
    result = TOOLS.run(list(objects.values()), tmp_path / "unchanged", CASES)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_seeded_fault_is_caught(objects, tmp_path, fault):
    TOOLS.assert_caught(objects, tmp_path, fault, kernel="attention_kernel", cases=CASES)
