"""The blocks of C, CMake and Swift on the pages compile, alone or as parts of a program."""

import shutil
from pathlib import Path

import pytest

from c_api_build import compiler, run
from c_api_headers import INCLUDE
from pages import ROOT, blocks
from parity.swift_leg import SwiftLeg


@pytest.mark.parametrize(
    ("language", "path"), [("c", "examples/c/attention.c"), ("swift", "examples/swift/main.swift")]
)
def test_the_blocks_of_the_readme_are_parts_of_the_examples(language: str, path: str) -> None:
    (block,) = blocks(language, "README.md")
    lines = iter(line.strip() for line in (ROOT / path).read_text("utf-8").splitlines())
    for line in filter(None, map(str.strip, block.text.splitlines())):
        assert line in lines, f"{path} lacks, or has elsewhere: {line}"


def test_c_compiles(tmp_path: Path) -> None:
    source = tmp_path / "blocks.c"
    parts = [block for block in blocks("c") if block.page != "README.md"]
    bodies = [f'#line {b.line} "{b.page}"\n{b.text}' for b in parts]
    source.write_text(f"{C_HEAD}{''.join(bodies)}}}\n", encoding="utf-8")
    flags = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    headers = [f"-I{path}" for path in INCLUDE]
    for file in (source, ROOT / "examples" / "c" / "attention.c"):
        run(compiler("c"), *flags, *headers, file)


C_HEAD = """
#include <stdio.h>
#include "mlx/c/mlx.h"
#include "mlx_h2o/c/h2o.h"

void blocks(mlx_vector_array keys, mlx_vector_array values, mlx_array importance,
            mlx_array positions, mlx_array key, mlx_array value,
            mlx_array kept, mlx_array none, mlx_optional_int v_bits,
            mlx_stream s) {
"""
"""What the blocks of C name."""


def test_cmake_is_that_of_the_example() -> None:
    example = (ROOT / "examples" / "c" / "CMakeLists.txt").read_text("utf-8")
    for block in blocks("cmake"):
        assert block.text in example, str(block)


SWIFT_IMPORTS = [
    f"import {name}" for name in ("Foundation", "MLX", "MLXH2O", "MLXH2OLM", "MLXLMCommon")
]
SWIFT_NAMES = """
    loaded: ModelContext, model: any LanguageModel, tokens: MLXArray, cache: [any KVCache],
    url: URL, queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
    importance: MLXArray, positions: MLXArray
"""
"""What the blocks of Swift name."""


@pytest.mark.slow
@pytest.mark.swift
def test_swift_compiles(tmp_path: Path) -> None:
    """Each block is the body of a function, checked against the modules of the Swift build."""
    built = SwiftLeg("swift", "native").executable()
    modules = built and built.parent / "Modules"
    swift = shutil.which("swiftc") or shutil.which("swiftc", path="/opt/swift/usr/bin")
    if modules is None or swift is None or not (modules / "MLXH2OLM.swiftmodule").exists():
        pytest.skip("the Swift package is not built: swift build")
    files = []
    for number, block in enumerate(b for b in blocks("swift") if b.page != "README.md"):
        lines = block.text.splitlines()
        imports = [line for line in lines if line.startswith("import ")]
        body = "\n".join(line for line in lines if line not in imports)
        file = tmp_path / f"block{number}.swift"
        where = f'#sourceLocation(file: "{block.page}", line: {block.line + len(imports)})'
        head = "\n".join([*SWIFT_IMPORTS, *imports, f"func block{number}({SWIFT_NAMES}) throws {{"])
        file.write_text(f"{head}\n{where}\n{body}\n#sourceLocation()\n}}\n", encoding="utf-8")
        files.append(file)
    maps = [f"-I{path}" for path in INCLUDE]
    made = modules.parent / "CMLXH2OReport.build" / "module.modulemap"  # by SwiftPM
    maps += ["-Xcc", f"-fmodule-map-file={made}"]
    run(swift, "-typecheck", "-parse-as-library", f"-I{modules}", *maps, *files)
