"""Builds of the H2O part of the C interface for tests: with faults, or with fakes before mlx-c.

The sources see only public mlx-c headers, as with the mlx-c of mlx-swift. A library made here has
its own copies of what it compiles, and takes the rest, mlx-c included, from the library under test.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import c_api
from c_api_headers import INCLUDE, ROOT
from made_once import made_once
from programs import run

SOURCES = ROOT / "mlx-c" / "h2o"
FAKES = ROOT / "tests" / "languages" / "c_api_fakes"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")


def compilers(language: str = "c++") -> list[str]:
    """The compilers of this machine for "c" or "c++"."""
    known = {"c": ("gcc", "clang"), "c++": ("g++", "clang++")}[language]
    return [path for path in map(shutil.which, known) if path]


def compiler(language: str = "c++") -> str:
    """A compiler; without one the test is skipped, and fails in CI."""
    found = compilers(language)
    if not found:
        c_api.missing(f"no compiler for {language} found")
    return found[0]


def link(directory: Path, name: str, objects: Sequence[Path]) -> c_api.Library:
    """Load a library of these objects over the library under test."""
    base = c_api.required().path
    path = directory / f"lib{name}.so"
    run(compiler(), "-shared", "-o", path, *objects, base.resolve(), f"-Wl,-rpath,{base.parent}")
    return c_api.Library(path)


def faked(factory: pytest.TempPathFactory, *fakes: str, declared: str) -> c_api.Library:
    """The H2O part linked with these fakes, which declare additional functions."""
    folder = factory.mktemp("faked")
    units = [compile_one(FAKES / f"{name}.cpp", folder / f"{name}.o") for name in fakes]
    built = link(folder, fakes[0], [*units, *whole(factory)])
    built.ffi.cdef(declared)
    return built


def compile_one(source: Path, target: Path) -> Path:
    """One object file; warnings are errors."""
    flags = ("-std=c++17", "-O0", "-fPIC", *WARNINGS, f"-I{SOURCES}")
    run(compiler(), *flags, *(f"-I{path}" for path in INCLUDE), "-c", source, "-o", target)
    return target


def whole(factory: pytest.TempPathFactory) -> list[Path]:
    """The H2O sources as one object, which takes a third of the time."""

    def make(folder: Path) -> None:
        lines = [f'#include "{source}"\n' for source in sorted(SOURCES.glob("*.cpp"))]
        (folder / "whole.cpp").write_text("".join(lines), "utf-8")
        compile_one(folder / "whole.cpp", folder / "whole.o")

    return [made_once(factory, "h2o-whole", make) / "whole.o"]


def objects(factory: pytest.TempPathFactory) -> list[Path]:
    """One object for each H2O source; a fault changes one of them."""
    sources = sorted(SOURCES.glob("*.cpp"))

    def make(folder: Path) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda s: compile_one(s, folder / f"{s.stem}.o"), sources))

    return [made_once(factory, "h2o-objects", make) / f"{source.stem}.o" for source in sources]
