"""The package builds with a compiler, and without one is complete except for the native part."""

import importlib.util
import os
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from mlx_h2o import version
from paths import ROOT
from programs import ended

PACKAGE = ROOT / "python" / "mlx_h2o"

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("scikit_build_core", "pip")),
    reason="the build back end is not installed",
)


def build_wheel(folder: Path, **environment: str) -> tuple[Path, str]:
    """The wheel that pip makes of this checkout with the tools installed here, and pip's words."""
    # Of an activated environment the tools are on the path; of one that is only named, not.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    result = ended(
        *(sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"),
        *("--no-build-isolation", "--wheel-dir", folder, ROOT),
        environment={"PATH": path, **environment},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel, result.stdout + result.stderr


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def package_files() -> set[str]:
    """What git knows of the package: sources and data."""
    listed = ended(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", PACKAGE, cwd=ROOT
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
@pytest.mark.parametrize("wrong", ["-DMLX_ROOT={0}", '-DCMAKE_CXX_FLAGS_RELEASE="-include {0}"'])
def test_a_failing_build_is_no_failing_install(wrong, tmp_path):
    wheel, words = build_wheel(tmp_path, CMAKE_ARGS=wrong.format(tmp_path / "nothing"))
    assert wheel.name.endswith("-py3-none-any.whl") and "back end was NOT built" in words


@pytest.mark.slow
def test_the_metadata_names_the_command_and_the_extras(without_compiler):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheel, _ = without_compiler
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        (scripts,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        text = archive.read(metadata).decode()
        assert "mlx_h2o=mlx_h2o.cli:main" in archive.read(scripts).decode().replace(" ", "")
    for extra in project["optional-dependencies"]:
        assert f"Provides-Extra: {extra}\n" in text


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("mlx", "0.32.2", r"mlx from 0\.32\.3 to below 0\.33, found 0\.32\.2: pip install 'mlx\["),
        ("mlx", "0.33.0rc1", r"pip install 'mlx\[cpu\]>=0\.32\.3,<0\.33' .*MLX_H2O_ANY_VERSION"),
        ("mlx-lm", "1.0", r"pip install 'mlx-lm>=0\.32,<0\.33'"),
    ],
)
def test_releases_that_were_not_tested_are_refused(name, found, said, monkeypatch):
    monkeypatch.delenv(version.ANY_VERSION, raising=False)
    monkeypatch.setattr(version, "_installed", {"mlx-cpu": found, name: found}.get)
    with pytest.raises(ImportError, match=said):
        version.check_versions()
    monkeypatch.setenv(version.ANY_VERSION, "1")
    version.check_versions()


def test_releases_that_were_tested_are_those_that_pip_installs(monkeypatch):
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, (first, end) in version.TESTED.items():
        assert f"{name}>={first},<{end}" in wanted
        for found in (first, f"{first}.dev7", f"{first[:4]}.99"):
            monkeypatch.setattr(version, "_installed", {name: found}.get)
            version.check_versions()
