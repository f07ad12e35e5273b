"""Type-check the Swift and C sources on Linux against checkouts of what Apple platforms use.

    python tools/typecheck_swift.py MLX_SWIFT MLX_SWIFT_LM SWIFT_NUMERICS

Each argument is a checkout at the version in question, mlx-swift with its submodules. mlx-swift's
Metal files, and of mlx-swift-lm all but the cache and attention files, are left out. Nothing is
linked or run.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES, TESTS = ROOT / "swift" / "Sources", ROOT / "swift" / "Tests"
METAL = frozenset({"GPU+Metal.swift", "MLXArray+Metal.swift"})
# What the cache file of mlx-swift-lm names of the files that are left out.
REST_OF_LM = """import MLX
public protocol LanguageModel {
    func newCache(parameters: GenerateParameters?) -> [KVCache]
}
public struct GenerateParameters {
    public var maxKVSize: Int?
    public init(maxKVSize: Int? = nil) { self.maxKVSize = maxKVSize }
}
"""


class Compiler:
    """swiftc, with the modules that it has made in one folder."""

    def __init__(self, modules: Path, headers: list[Path]) -> None:
        self.modules = modules
        self.headers = [f"-I{path}" for path in (modules, *headers)]
        swiftc = shutil.which("swiftc") or sys.exit("swiftc is not on the path")
        plugins = Path(swiftc).resolve().parents[1] / "lib/swift/host/plugins/testing"
        self.command = [swiftc, "-module-cache-path", str(modules / "cache"), *self.headers]
        self.testing = ["-plugin-path", str(plugins)]

    def module(self, name: str, files: list[Path], *flags: str) -> None:
        """Make a module that others can import."""
        made = ["-o", str(self.modules / f"{name}.swiftmodule")]
        self.run("-parse-as-library", "-wmo", "-emit-module", *flags, *made, name=name, files=files)

    def run(self, *flags: str, name: str, files: list[Path]) -> None:
        paths = sorted(map(str, files))
        print(f"{name}: {len(paths)} files", flush=True)
        subprocess.run([*self.command, *flags, "-module-name", name, *paths], check=True)


def swift(folder: Path, *, without: frozenset[str] = frozenset()) -> list[Path]:
    return [path for path in folder.rglob("*.swift") if path.name not in without]


def clang_module(name: str, folder: Path, *headers: str) -> Path:
    """A folder with the map of a C module; its headers are named from the root of the file tree."""
    folder.mkdir(parents=True)
    lines = "".join(f'  header "{header}"\n' for header in headers)
    (folder / "module.modulemap").write_text(f"module {name} {{\n{lines}  export *\n}}\n")
    return folder


def theirs(compiler: Compiler, options: argparse.Namespace, scratch: Path) -> None:
    """The modules of mlx-swift and mlx-swift-lm, as far as we use them."""
    for name in ("RealModule", "ComplexModule", "IntegerUtilities", "Numerics"):
        folder = options.swift_numerics / "Sources" / name
        if folder.is_dir():
            compiler.module(name, swift(folder))
    mlx = options.mlx_swift / "Source" / "MLX"
    compiler.module("MLX", swift(mlx, without=METAL), "-swift-version", "5")
    folder = options.mlx_swift_lm / "Libraries" / "MLXLMCommon"
    files = [scratch / "Rest.swift", scratch / "KVCache.swift", folder / "AttentionUtils.swift"]
    files[0].write_text(REST_OF_LM)
    cache = (folder / "KVCache.swift").read_text("utf-8")
    files[1].write_text(cache.replace("import MLXNN\n", ""), "utf-8")
    compiler.module("MLXLMCommon", files, "-swift-version", "5", "-suppress-warnings")


def ours(compiler: Compiler) -> None:
    """Our modules, the programs, and the tests; a warning is an error."""
    strict = ("-swift-version", "6", "-warnings-as-errors")
    for name in ("MLXH2O", "MLXH2OLM"):
        compiler.module(name, swift(SOURCES / name), "-enable-testing", *strict)
    parity = swift(SOURCES / "mlx-h2o-parity")
    library = [path for path in parity if path.name != "main.swift"]
    compiler.module("mlx_h2o_parity", library, "-enable-testing", *strict)
    compiler.run("-typecheck", *strict, name="parity", files=parity)
    compiler.run("-typecheck", *strict, name="example", files=swift(ROOT / "examples" / "swift"))
    for name in ("MLXH2OTests", "MLXH2OLMTests", "ThinMLXTests"):
        flags = ("-typecheck", "-parse-as-library", *compiler.testing, *strict)
        compiler.run(*flags, name=name, files=swift(TESTS / name))


def c_sources(mlx_c: Path) -> None:
    """mlx-c/h2o on the headers of mlx-c, as SwiftPM compiles it on Apple platforms."""
    folder = ROOT / "mlx-c" / "h2o"
    files = sorted(folder.glob("*.cpp"))
    print(f"mlx-c/h2o: {len(files)} files", flush=True)
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Werror", f"-I{mlx_c}", f"-I{folder}/include"]
    for path in files:
        subprocess.run(["c++", *flags, str(path)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("mlx_swift", "mlx_swift_lm", "swift_numerics"):
        parser.add_argument(name, type=lambda text: Path(text).resolve())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        mlx_c = options.mlx_swift / "Source" / "Cmlx" / "mlx-c"
        names = [str(mlx_c / "mlx" / "c" / f"{name}.h") for name in ("mlx", "transforms_impl")]
        report = str(SOURCES / "CMLXH2OReport" / "include" / "report.h")
        headers = [
            mlx_c,
            clang_module("Cmlx", scratch / "cmlx", *names),
            clang_module("CMLXH2OReport", scratch / "report", report),
            options.swift_numerics / "Sources" / "_NumericsShims" / "include",
            ROOT / "mlx-c" / "h2o" / "include",
        ]
        compiler = Compiler(scratch / "modules", headers)
        try:
            c_sources(mlx_c)
            theirs(compiler, options, scratch)
            ours(compiler)
        except subprocess.CalledProcessError as error:
            return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
