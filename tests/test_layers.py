"""The folders of the package import in one direction: from those that come before."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mlx_h2o

PACKAGE = Path(mlx_h2o.__file__).parent
LAYERS = ("operations", "policies", "caches", "lm", "commands")


def imported(file: Path) -> set[str]:
    """The folders of the package that a file imports from."""
    folder = ["mlx_h2o", *file.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "mlx_h2o" and len(name) > 1}
    return found & set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_folder_imports_only_from_those_before_it(layer: str) -> None:
    later = set(LAYERS[LAYERS.index(layer) + 1 :])
    files = sorted((PACKAGE / layer).glob("*.py"))
    assert len(files) > 1
    assert {file.name: imported(file) & later for file in files if imported(file) & later} == {}


def test_no_module_lies_beside_the_folders_but_the_public_ones() -> None:
    beside = {file.stem for file in PACKAGE.glob("*.py")}
    assert beside == {"__init__", "__main__", "_kernel_text", "cli", "config", "evaluate", "fast"}
