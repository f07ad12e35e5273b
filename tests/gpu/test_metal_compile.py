"""Apple's compiler on every variant of the kernels, as MLX passes them to Metal at run time."""

import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from emulator import EmulatorBackend
from emulator.rows import every_row_launch
from emulator.text import MetalText
from gpu.test_kernel_types import texts_of
from programs import ended

pytestmark = pytest.mark.skipif(
    sys.platform != "darwin" or shutil.which("xcrun") is None, reason="needs Xcode"
)

INCLUDE = Path(mx.__file__).parent / "include"
# The language version of macOS 14.
COMMAND = ("xcrun", "-sdk", "macosx", "metal", "-std=metal3.1", "-x", "metal", "-fsyntax-only")
# What MLX puts before the text of a kernel.
BEFORE = '#include <metal_stdlib>\n#include "mlx/backend/metal/kernels/utils.h"\n'


def complaints(*texts: MetalText) -> str:
    unit = [BEFORE]
    for index, text in enumerate(texts):
        unit.append(f"namespace variant_{index} {{\n{text.generated}\n}}")
    command = [*COMMAND, f"-I{INCLUDE}", "-Werror", "-Wno-unused-function", "-"]
    run = ended(*command, input="\n".join(unit))
    return run.stderr if run.returncode else ""


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_every_variant_compiles(dtype: str) -> None:
    for texts in texts_of(dtype):
        assert complaints(*texts) == ""


def test_kernels_on_rows_compile() -> None:
    assert complaints(*(EmulatorBackend().text(each) for each in every_row_launch().values())) == ""


def test_a_mistake_is_noticed() -> None:
    wrong = MetalText("", "wrong", (), "kernel void wrong(device float* a) { a = 1.0f; }")
    assert "error: " in complaints(wrong)
