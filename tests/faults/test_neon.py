"""Faults in NEON, built for AArch64 and run under QEMU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from faults.driver import Fault, Toolchain
from made_once import made_once

TOOLS = Toolchain(
    "aarch64-linux-gnu-g++",
    ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"),
    # QEMU 7.2 stops at an assertion of its own where a child of a process with threads starts one.
    ("-DMLX_H2O_TEST_FORK=0",),
    cases="120",
    reached="attention_neon_kernel",
)

FAULTS = {
    "the upper half of eight bytes is the lower": Fault(
        "unpack_bytes", "vget_high_u16(wide)", "vget_low_u16(wide)", caught="of target neon"
    ),
    "half bytes are shifted the other way": Fault(
        "unpack_nibbles", "vdupq_n_s32(-4 * i)", "vdupq_n_s32(4 * i)", caught="of target neon"
    ),
    "codes are looked up in the first eight levels": Fault(
        "unpack_codes",
        "vqtbl4q_u8(levels,",
        "vqtbl2q_u8({levels.val[0], levels.val[1]},",
        caught="of target neon",
    ),
    "every fourth key takes no part": Fault(
        "lanes_not_below",
        "vbicq_u32(bit, vcltq_f32(x, limit)))",
        "vbicq_u32(bit, vcltq_f32(x, limit))) & 7u",
        caught="out of target neon",
    ),
    "a value without weight takes part": Fault(
        "where_nonzero", "vceqzq_f32(weight)", "vceqzq_f32(value)", caught="out of target neon"
    ),
}

pytestmark = pytest.mark.skipif(
    shutil.which(TOOLS.compiler) is None or shutil.which(TOOLS.emulator[0]) is None,
    reason="no AArch64 cross compiler or no QEMU",
)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "neon", TOOLS.compile_all)


def test_the_unchanged_kernels_pass(objects: Path, tmp_path: Path) -> None:
    found = TOOLS.complaint(sorted(objects.glob("*.o")), tmp_path / "unchanged", "\0")
    assert found.startswith("status 0:"), found


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(objects: Path, tmp_path: Path, fault: Fault) -> None:
    TOOLS.assert_caught(objects, tmp_path, fault)
