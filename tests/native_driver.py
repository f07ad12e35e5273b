"""Builds and runs the native test driver, h2o_native_test, from copies of the kernels."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "core" / "src"
DRIVER = ROOT / "tests" / "native"
CASES = "120"

# A header that several kernels include: the one whose cases must see its faults.
SHARED = {"logit_masks.h": "attention_kernel"}


@dataclass(frozen=True)
class Toolchain:
    """A compiler, and what runs its programs where this machine does not."""

    compiler: str
    emulator: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def compile_object(self, source: Path, include: Path, target: Path) -> Path:
        # No fused multiply-add in the moving average, as in CMakeLists.txt.
        flags = ["-std=c++20", "-O1", "-ffp-contract=off", *self.flags, f"-I{include}"]
        flags += ["-c", str(source)]
        subprocess.run([self.compiler, *flags, "-o", str(target)], check=True)
        return target

    def compile_all(self, folder: Path) -> dict[str, Path]:
        """Object files of the driver and of the unchanged kernels, by name."""
        sources = [DRIVER / "native_test.cpp"]
        for part in ("*_kernel.cpp", "thread_*.cpp"):
            sources += sorted(SOURCES.glob(part))
        return {
            source.stem: self.compile_object(source, SOURCES, folder / f"{source.stem}.o")
            for source in sources
        }

    def run(
        self, objects: list[Path], program: Path, cases: str = CASES
    ) -> subprocess.CompletedProcess[str]:
        link = [self.compiler, *map(str, objects), "-o", str(program), "-pthread"]
        subprocess.run(link, check=True)
        command = [*self.emulator, str(program), cases]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    def assert_caught(
        self,
        objects: dict[str, Path],
        folder: Path,
        fault: tuple[str, str, str, str],
        kernel: str | None = None,
        cases: str = CASES,
    ) -> None:
        """Seeds (file, text, replacement, complaint) into a copy; its kernel is compiled again."""
        file, text, replacement, complaint = fault
        source = (SOURCES / file).read_text()
        assert source.count(text) == 1, f"the fault does not apply to {file} exactly once"
        mutant = source.replace(text, replacement)
        assert mutant != source
        copy = folder / "src"
        shutil.copytree(SOURCES, copy)
        (copy / file).write_text(mutant)
        if kernel is None:
            named = (name for name in objects if file.startswith(name.removesuffix("_kernel")))
            (kernel,) = (SHARED[file],) if file in SHARED else named
        changed = self.compile_object(copy / f"{kernel}.cpp", copy, folder / "mutant.o")
        result = self.run([*{**objects, kernel: changed}.values()], folder / "mutant", cases)
        assert result.returncode == 1, "the fault went unnoticed"
        assert complaint in result.stderr
