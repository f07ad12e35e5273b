"""The package builds with a compiler, and without one is whole but for the native part."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import native_build
from paths import ROOT

PACKAGE = ROOT / "python" / "mlx_h2o"

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("scikit_build_core", "pip")),
    reason="the build back end is not installed",
)


def build_wheel(folder: Path, **environment: str) -> tuple[Path, str]:
    """The wheel that pip makes of this checkout with the tools installed here, and pip's words."""
    # Of an activated environment the tools are on the path; of one that is only named, not.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"),
            *("--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)),
        ],
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel, result.stdout + result.stderr


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def package_files() -> set[str]:
    """What git knows of the package: sources and data."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", str(PACKAGE)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return {path.removeprefix("python/") for path in listed.stdout.split()}


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("without")
    nowhere = str(folder / "no-such-compiler")
    return build_wheel(folder, CC=nowhere, CXX=nowhere)


@pytest.mark.slow
def test_without_a_compiler_the_install_is_pure_python(without_compiler):
    wheel, words = without_compiler
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "The native CPU back end was NOT built" in words
    contents = names(wheel)
    assert package_files() <= contents
    assert not any(name.endswith((".so", ".dylib")) for name in contents)


@pytest.mark.exhaustive
def test_a_failing_configuration_is_no_failing_install(tmp_path):
    wheel, words = build_wheel(tmp_path, CMAKE_ARGS=f"-DMLX_ROOT={tmp_path / 'no-mlx'}")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "The native CPU back end was NOT built" in words


@pytest.mark.exhaustive
def test_a_failing_compilation_is_no_failing_install(tmp_path):
    # CMake tries the compiler without these flags.
    missing = f"-include {tmp_path / 'no-such-header.h'}"
    wheel, words = build_wheel(tmp_path, CMAKE_ARGS=f'-DCMAKE_CXX_FLAGS_RELEASE="{missing}"')
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "The native CPU back end was NOT built" in words


@pytest.mark.exhaustive
@pytest.mark.slow
def test_with_a_compiler_the_wheel_carries_the_extension(tmp_path):
    native_build.need()
    wheel, words = build_wheel(tmp_path)
    assert "NOT built" not in words
    assert any(name.startswith("mlx_h2o/_core.") and name.endswith(".so") for name in names(wheel))
    assert package_files() <= names(wheel)
    # It runs from where an installation would put it, beside MLX.
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import mlx_h2o; assert mlx_h2o.backends()['native'].available; print(mlx_h2o.__file__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(tmp_path))


@pytest.mark.slow
def test_the_metadata_names_the_command_and_the_extras(without_compiler):
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheel, _ = without_compiler
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        (scripts,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        text = archive.read(metadata).decode()
        assert "mlx_h2o=mlx_h2o.cli:main" in archive.read(scripts).decode().replace(" ", "")
    for extra in project["optional-dependencies"]:
        assert f"Provides-Extra: {extra}\n" in text
    assert f"Version: {project['version']}\n" in text
