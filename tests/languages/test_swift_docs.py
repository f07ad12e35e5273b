"""Every public name of the Swift modules has a comment of DocC's, or its protocol has one."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from parity.swift_leg import SwiftLeg
from paths import ROOT


@pytest.mark.swift
@pytest.mark.slow
@pytest.mark.parametrize("module", ["MLXH2O", "MLXH2OLM"])
def test_every_public_name_is_documented(module: str, tmp_path: Path) -> None:
    built, swift = SwiftLeg("swift", "native").executable(), shutil.which("swift")
    if built is None or swift is None:
        pytest.skip("the Swift package is not built: swift build")
    headers = [ROOT / "mlx-c" / "include", ROOT / "mlx-c" / "h2o" / "include"]
    given = [f"-I{folder}" for folder in headers]
    for folder in (*headers, built.parent / "CMLXH2OReport.build"):
        given.append(f"-fmodule-map-file={folder / 'module.modulemap'}")
    line = [str(Path(swift).with_name("swift-symbolgraph-extract")), "-module-name", module]
    line += ["-I", str(built.parent / "Modules"), "-output-dir", str(tmp_path)]
    line += ["-target", f"{platform.machine()}-unknown-linux-gnu", "-skip-synthesized-members"]
    line += ["-minimum-access-level", "public"]
    done = subprocess.run(
        [*line, *(word for flag in given for word in ("-Xcc", flag))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    symbols = json.loads((tmp_path / f"{module}.symbols.json").read_text())["symbols"]
    bare = [".".join(one["pathComponents"]) for one in symbols if "docComment" not in one]
    assert len(symbols) > 50
    assert not bare
