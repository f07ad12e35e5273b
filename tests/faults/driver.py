"""Builds and runs the native test driver, h2o_native_test, with a fault in one kernel."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from faults.text import Edit
from paths import ROOT

SOURCES = ROOT / "core" / "src"
DRIVER = ROOT / "tests" / "native" / "native_test.cpp"
STANDARD = re.compile(r"#include <\w+>\n")
SECONDS = 600


@dataclass(frozen=True)
class Toolchain:
    """A compiler, and what runs its programs where this machine does not."""

    compiler: str
    emulator: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    cases: str = "240"
    reached: str = r"\w+"
    """The sources where a fault shows, as an expression: the others are not compiled again."""

    def compile_object(self, source: Path, target: Path, *options: str) -> Path:
        # No fused multiply-add in the moving average, as in CMakeLists.txt.
        flags = ["-std=c++20", *(options or ("-O1",)), "-ffp-contract=off", *self.flags]
        flags.append(f"-I{SOURCES if source == DRIVER else source.parents[1]}")
        flags.append(f"-I{SOURCES.parent / 'include'}")
        subprocess.run([self.compiler, *flags, "-c", source, "-o", target], check=True)
        return target

    def compile_all(self, folder: Path) -> None:
        """Object files of the driver and of the unchanged kernels, by the names of the sources."""
        with ThreadPoolExecutor(2) as pool:
            sources = [DRIVER, *kernels()]
            list(pool.map(lambda s: self.compile_object(s, folder / f"{s.stem}.o"), sources))
        # What kernels include of C++ itself takes half of the time with a fault.
        texts = (file.read_text("utf-8") for kernel in kernels() for file in read_by(kernel))
        header = folder / "standard.h"
        header.write_text(
            "".join(sorted({line for text in texts for line in STANDARD.findall(text)}))
        )
        self.compile_object(header, folder / "standard.h.gch", "-O0", "-xc++-header")

    def complaint(self, objects: list[Path], program: Path, words: str) -> str:
        """The first line of the driver that has the words; its last lines where none has.

        The driver is stopped there: the rest of its cases would say the same.
        """
        link = [self.compiler, *objects, "-o", program, "-pthread"]
        subprocess.run(link, check=True)
        command = [*self.emulator, program, self.cases]
        lines = []
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as driver:
            limit = Timer(SECONDS, driver.kill)
            limit.start()
            try:
                for line in driver.stderr or ():
                    lines.append(line)
                    if words in line:
                        driver.kill()
                        return line
            finally:
                limit.cancel()
        return f"status {driver.returncode}: {''.join(lines[-5:])}"

    def assert_caught(self, objects: Path, folder: Path, fault: Edit) -> None:
        """Compiles what the fault is in again and runs the driver."""
        units = {source.stem: objects / f"{source.stem}.o" for source in (DRIVER, *kernels())}
        file, text = fault.apply_to([*sorted(SOURCES.glob("*/*.h")), *kernels()])
        copy = folder / "src"
        shutil.copytree(SOURCES, copy)
        (copy / file.relative_to(SOURCES)).write_text(text, "utf-8")
        sources = [source for source in kernels() if re.fullmatch(self.reached, source.stem)]
        changed = [source for source in sources if file in read_by(source)]
        assert changed, f"{file.name} is in no kernel"
        for source in changed:
            # Compiling takes longer than running.
            target, precompiled = folder / f"{source.stem}.o", str(objects / "standard.h")
            units[source.stem] = self.compile_object(
                copy / source.relative_to(SOURCES), target, "-O0", "-include", precompiled
            )
        found = self.complaint([*units.values()], folder / "mutant", fault.caught)
        assert fault.caught in found, found


def kernels() -> list[Path]:
    """The sources that need no MLX."""
    return [*sorted(SOURCES.glob("*/*_kernel.cpp")), *sorted(SOURCES.glob("cpu/thread_*.cpp"))]


def read_by(source: Path) -> set[Path]:
    """The source, and what it includes, directly or not."""
    found, waiting = {source}, [source]
    while waiting:
        file = waiting.pop()
        names = re.findall(r'"((?:\w+/)?\w+\.h)"', file.read_text("utf-8"))
        places = {folder / name for name in names for folder in (SOURCES, file.parent)}
        new = {place for place in places if place.exists()} - found
        found |= new
        waiting += new
    return found
