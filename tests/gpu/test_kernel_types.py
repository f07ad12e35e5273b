"""Clang's type check of the kernels, with Metal's address spaces as real ones."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulator import EmulatorBackend
from emulator.build import SHIMS
from emulator.cases import Case
from emulator.rows import every_row_launch
from emulator.text import MetalText
from emulator.variants import every_variant
from faults.metal import seeded
from faults.text import Edit
from programs import ended, missing

# Metal's language; the version of the targets that macOS 14 has.
FLAGS = ["-x", "c++", "-std=c++14", "--target=aarch64-unknown-linux-gnu"]
FLAGS += ["-nostdinc", "-nostdinc++", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
# Attributes and unused parameters of the generated signature.
FLAGS += ["-Wno-unknown-attributes", "-Wno-unused-parameter"]


def clang() -> str | None:
    """Clang on the path, or the one that lies beside swift."""
    beside = Path(shutil.which("swift") or "swift").resolve().parent
    candidates = (*map(shutil.which, ("clang++", "clang")), shutil.which(beside / "clang++"))
    return next((path for path in candidates if path), None)


@pytest.fixture(scope="module")
def compiler() -> str:
    return clang() or missing("no clang found (clang++, clang, or beside swift)")


def texts_of(dtype: str) -> Iterator[list[MetalText]]:
    """Every variant, a few at a time: one unit of all takes gigabytes."""
    texts = [
        text
        for name, request, blocks in every_variant()
        if name.startswith(f"{dtype}-")
        for text in EmulatorBackend(blocks=blocks).texts(request)
    ]
    assert len(texts) >= 32 + 2 * 10 + 42
    return (texts[start : start + 32] for start in range(0, len(texts), 32))


def complaints(compiler: str, *texts: MetalText) -> str:
    """What clang says about the texts, which must not share a name."""
    unit = [f'#include "{SHIMS / "check.h"}"']
    for index, text in enumerate(texts):
        unit.append(f"namespace variant_{index} {{\n{text.text}\nauto* use = &{text.function};\n}}")
    run = ended(compiler, *FLAGS, "-", input="\n".join(unit))
    assert run.returncode == 0 or run.stderr
    return run.stderr


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_every_variant_has_its_types_right(compiler: str, dtype: str) -> None:
    for texts in texts_of(dtype):
        assert complaints(compiler, *texts) == ""


def test_kernels_on_rows_have_their_types_right(compiler: str) -> None:
    texts = [EmulatorBackend().text(each) for each in every_row_launch().values()]
    assert complaints(compiler, *texts) == ""


# Each is right on a machine with one address space.
MISTAKES = {
    "a threadgroup array behind a plain pointer": Edit(
        "sdpa_vector",
        "const bool has_part",
        "float* part_maxima = maxima;\n  part_maxima[0] = 0.0f;\n  const bool has_part",
    ),
    "a short input taken for device memory": Edit(
        "sdpa_vector",
        "h2o_softmax state",
        "const device float* scalars = params;\n  (void)scalars;\n  h2o_softmax state",
    ),
    "an output behind a threadgroup pointer": Edit(
        "sdpa_vector",
        "h2o_softmax state",
        "threadgroup float* row_scores = scores;\n  (void)row_scores;\n  h2o_softmax state",
    ),
    "a write to an input": Edit(
        "sdpa_vector", "h2o_softmax state", "keys[0] = 0;\n  h2o_softmax state"
    ),
}


@pytest.mark.faults
@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_address_space_is_an_error(compiler: str, name: str) -> None:
    backend = seeded(MISTAKES[name])
    request = Case(sizes=(192, 128)).request()
    (changed,), (right,) = backend.texts(request), EmulatorBackend().texts(request)
    assert changed.text != right.text
    assert "error: " in complaints(compiler, changed)
