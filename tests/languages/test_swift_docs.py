"""Every public name of the Swift modules is documented, and DocC has no complaints."""

import json
import platform
import shutil
from pathlib import Path

import pytest

from parity.swift_leg import SwiftLeg
from paths import ROOT
from programs import run


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
    tool, graphs = Path(swift).with_name, tmp_path / "graphs"
    graphs.mkdir()
    line = [tool("swift-symbolgraph-extract"), "-module-name", module, "-skip-synthesized-members"]
    line += ["-I", built.parent / "Modules", "-output-dir", graphs, "-minimum-access-level"]
    line += ["public", "-target", f"{platform.machine()}-unknown-linux-gnu"]
    run(*line, *(word for flag in given for word in ("-Xcc", flag)))
    symbols = json.loads((graphs / f"{module}.symbols.json").read_text())["symbols"]
    bare = [".".join(one["pathComponents"]) for one in symbols if "docComment" not in one]
    assert len(symbols) > 50
    assert not bare
    catalogue = ROOT / "swift" / "Sources" / module / f"{module}.docc"
    line = [tool("docc"), "convert", catalogue, "--additional-symbol-graph-dir", graphs]
    line += ["--fallback-bundle-identifier", module, "--output-dir", tmp_path / "archive"]
    run(*line, "--warnings-as-errors")
