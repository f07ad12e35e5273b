"""CMake builds the H2O part of the C interface on an installed mlx-c, and installs it.

The installed mlx-c is the subset in this repository, which uses mlx-c's names, under its own
prefix: a program that uses it sees no difference.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

import c_api
from c_api_build import compiler, run
from c_api_headers import ROOT


@pytest.fixture(scope="module")
def cmake() -> str:
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    found = shutil.which("cmake", path=path)
    return found or c_api.missing("CMake not found")


@pytest.fixture(scope="module")
def build() -> Path:
    """The build directory of the library under test."""
    library = c_api.required().path
    if not (library.parent / "libmlxc.so").exists():
        c_api.missing(f"no CMake build with the subset of mlx-c around {library}")
    return library.parent


def configure(cmake: str, source: Path, build: Path, *settings: str | Path) -> None:
    """Debug: what is compiled here runs once."""
    compilers = (f"-DCMAKE_C_COMPILER={compiler('c')}", f"-DCMAKE_CXX_COMPILER={compiler()}")
    run(cmake, "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Debug", *compilers, *settings)


@pytest.fixture(scope="module")
def mlxc(cmake: str, build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with an mlx-c and nothing else."""
    prefix = tmp_path_factory.mktemp("mlxc")
    run(cmake, "--install", build, "--component", "mlxc", "--prefix", prefix)
    files = {str(path.relative_to(prefix)) for path in prefix.rglob("*.*")}
    assert {"include/mlx/c/mlx.h", "share/cmake/MLXC/MLXCConfig.cmake"} <= files
    assert not any("h2o" in name for name in files)
    return prefix


@pytest.fixture(scope="module")
def installed(cmake: str, mlxc: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with the H2O part, built against that mlx-c as a shared library."""
    folder, prefix = tmp_path_factory.mktemp("h2o"), tmp_path_factory.mktemp("prefix")
    configure(
        *(cmake, ROOT, folder, "-DMLX_H2O_BUILD_C=ON", "-DMLX_H2O_USE_INSTALLED_MLXC=ON"),
        *("-DBUILD_SHARED_LIBS=ON", f"-DCMAKE_PREFIX_PATH={mlxc}"),
        "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON",
    )
    run(cmake, "--build", folder, "--parallel", "2")
    run(cmake, "--install", folder, "--prefix", prefix)
    return prefix


@pytest.mark.exhaustive
def test_what_is_installed(installed: Path) -> None:
    files = {str(path.relative_to(installed)) for path in installed.rglob("*.*")}
    headers = ROOT / "mlx-c" / "h2o" / "include"
    expected = {f"include/{path.relative_to(headers)}" for path in headers.rglob("*.h")}
    expected |= {
        f"share/cmake/MLXH2OC/MLXH2OC{name}.cmake"
        for name in ("Config", "ConfigVersion", "Targets")
    }
    assert expected <= files
    (library,) = installed.rglob("libmlxh2oc.so")
    undefined = run("nm", "-D", "--undefined-only", library)
    assert " mlx_array_set\n" in undefined, "mlx-c is not where it comes from"
    assert "mlx4core" not in undefined, "a C++ name of MLX is asked for"
    extra = {name for name in files - expected if "libmlxh2oc" not in name}
    assert extra == {"share/cmake/MLXH2OC/MLXH2OCTargets-debug.cmake"}


def consume(cmake: str, folder: Path, *prefixes: Path) -> str:
    """What the example prints, built as a project that finds the package under these prefixes."""
    listed = ";".join(map(str, prefixes))
    configure(cmake, ROOT / "examples" / "c", folder, f"-DCMAKE_PREFIX_PATH={listed}")
    run(cmake, "--build", folder)
    return run(folder / "attention")


@pytest.mark.exhaustive
def test_a_program_finds_and_runs_it(
    cmake: str, build: Path, mlxc: Path, installed: Path, tmp_path: Path
) -> None:
    """The same answers as from the library that brings its own mlx-c, installed in its turn."""
    prefix = tmp_path / "prefix"
    run(cmake, "--install", build, "--prefix", prefix)
    assert not list(prefix.rglob("libmlxc.so")) and not (prefix / "include" / "mlx").exists()
    one = consume(cmake, tmp_path / "one", installed, mlxc)
    other = consume(cmake, tmp_path / "other", prefix)
    assert one == other and one.startswith("head 0 kept: 0 1 ")


@pytest.mark.slow
def test_without_an_mlxc_cmake_says_so(cmake: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="MLXC"):
        configure(
            *(cmake, ROOT, tmp_path, "-DMLX_H2O_BUILD_C=ON", "-DMLX_H2O_USE_INSTALLED_MLXC=ON"),
            *("-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF", "-DCMAKE_FIND_USE_SYSTEM_PATH=OFF"),
        )
