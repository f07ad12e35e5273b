"""Compiles generated Metal text with the host shims into a shared object, and keeps it.

Objects are kept in a cache directory (MLX_H2O_CACHE, else ~/.cache/mlx-h2o) under a key of
everything that goes into them: text, shims, compiler, flags.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from emulator.text import MetalText, Parameter
from paths import ROOT

SHIMS = ROOT / "metal" / "shims"

# What the launcher passes for the thread-position attributes of a generated signature.
ATTRIBUTES = {
    "simdgroup_index_in_threadgroup": "thread.simdgroup",
    "simdgroups_per_threadgroup": "thread.simdgroups",
    "thread_index_in_simdgroup": "thread.lane",
    "thread_index_in_threadgroup": "thread.index",
    "thread_position_in_threadgroup": "position(thread.in_threadgroup)",
    "threadgroup_position_in_grid": "position(thread.threadgroup)",
    "threadgroups_per_grid": "position(thread.threadgroups)",
    "threads_per_simdgroup": "32u",
    "threads_per_threadgroup": "position(thread.threads)",
}

FLAGS = (
    "-std=c++20",
    # Compiling takes longer than running; more optimisation would double it.
    "-Og",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    # A local that is read before it is written gets -1.7e38, not a lucky zero.
    "-ftrivial-auto-var-init=pattern",
    "-Wall",
    "-Wextra",
    "-Werror",
    # [[kernel]], [[buffer(0)]]: attributes of Metal.
    "-Wno-attributes",
    "-Wno-unknown-attributes",
    # The generated signature has everything that the text names, used or not.
    "-Wno-unused-parameter",
)

ERROR_BYTES = 1024

_one_prefix = threading.Lock()


class BuildError(Exception):
    """The compiler refused the text; the message is its output."""


@cache
def compiler() -> str | None:
    """Path of the C++ compiler: MLX_H2O_EMULATOR_CXX, g++ or clang++; None without one."""
    named = os.environ.get("MLX_H2O_EMULATOR_CXX")
    for candidate in (named,) if named else ("g++", "clang++"):
        if found := shutil.which(candidate):
            return found
    return None


def compile_text(
    text: MetalText, defines: tuple[str, ...] = (), counted: frozenset[str] = frozenset()
) -> Path:
    """The path of the text's shared object, compiled unless the cache has it.

    Reads of the buffers named in ``counted`` are noted: see ``translation_unit``.
    """
    flags = (*_machine_flags(), *(f"-D{define}" for define in defines))
    unit = translation_unit(text, counted)
    target = _cache() / f"kernel-{_key(unit, *flags)}.so"
    if not target.exists():
        prefix = _prefix(flags)
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            source = Path(folder) / "kernel.cpp"
            source.write_text(unit, "ascii")
            runtime = str(_runtime())
            options = ("-shared", "-include", str(prefix), *flags)
            _compile(source, target, options, runtime)
    return target


def translation_unit(text: MetalText, counted: frozenset[str] = frozenset()) -> str:
    """C++ that holds the kernel and one C function that launches it.

    Its ``buffers`` are those of the kernel; behind them, where buffers are ``counted``, there is
    one more for each of the kernel's: a byte per byte, in which 1 means that it was read.
    """
    behind = len(text.buffer_names())
    arguments = ", ".join(_argument(p, counted, behind) for p in text.parameters)
    body = text.text
    for parameter in text.parameters:
        if parameter.name in counted:
            declared = f"{parameter.type} {parameter.name} [["
            if body.count(declared) != 1:
                raise BuildError(f"the text declares {declared!r} {body.count(declared)} times")
            body = body.replace(declared, f"{_counted_type(parameter)} {parameter.name} [[")
    include = f'#include "{SHIMS / "counted.h"}"\n' if counted else ""
    return f"""{include}#include "{SHIMS / "host.h"}"
#include "{SHIMS / "host_begin.h"}"
#line 1 "{text.function.partition("<")[0]}"
{body}
#line 1 "launcher"
#include "{SHIMS / "host_end.h"}"
[[maybe_unused]] static uint3 position(const emulator::Position& p) {{
  return {{p.x, p.y, p.z}};
}}
extern "C" int h2o_emulate(void* const* buffers, const unsigned* sizes, int schedule,
    unsigned long seed, int workers, char* error) {{
  const emulator::Launch launch = {{
      {{sizes[0], sizes[1], sizes[2]}}, {{sizes[3], sizes[4], sizes[5]}},
      static_cast<emulator::Schedule>(schedule), seed, workers}};
  try {{
    emulator::run(launch, [buffers](const emulator::ThreadInfo& thread) {{
      (void)thread;
      {text.function}({arguments});
    }});
    return 0;
  }} catch (const std::exception& exception) {{
    std::snprintf(error, {ERROR_BYTES}, "%s", exception.what());
    return 1;
  }}
}}
"""


def _counted_type(parameter: Parameter) -> str:
    """The type of an input, ``const device T*``, with a pointer that notes what it reads."""
    words = parameter.type.removesuffix("*").split()
    (element,) = (word for word in words if word not in ("const", "device", "constant"))
    return f"emulator::Counted<{element}>"


def _argument(parameter: Parameter, counted: frozenset[str], behind: int) -> str:
    if not parameter.attribute.startswith("buffer("):
        return ATTRIBUTES[parameter.attribute]
    index = int(parameter.attribute.removeprefix("buffer(").removesuffix(")"))
    if parameter.name in counted:
        return f"{_counted_type(parameter)}(buffers[{index}], buffers[{behind + index}])"
    words = [word for word in parameter.type.split() if word not in ("device", "constant")]
    kind = " ".join(words)
    if kind.endswith("&"):
        return f"*static_cast<{kind[:-1]}*>(buffers[{index}])"
    return f"static_cast<{kind}>(buffers[{index}])"


@cache
def _machine_flags() -> tuple[str, ...]:
    # Hardware conversion of float16; without it every load calls a library function.
    if platform.machine() == "x86_64" and "f16c" in Path("/proc/cpuinfo").read_text("utf-8"):
        return (*FLAGS, "-mf16c")
    return FLAGS


@cache
def _cache() -> Path:
    root = os.environ.get("MLX_H2O_CACHE")
    path = (Path(root) if root else Path.home() / ".cache" / "mlx-h2o") / "emulator"
    path.mkdir(parents=True, exist_ok=True)
    return path


@cache
def _toolchain() -> str:
    """Everything but text and flags that an object depends on."""
    path = compiler()
    if path is None:
        raise BuildError("no C++ compiler: install g++, or name one in MLX_H2O_EMULATOR_CXX")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    shims = "".join(file.read_text("ascii") for file in sorted(SHIMS.iterdir()))
    return f"{path}\n{version.stdout}\n{shims}"


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join((_toolchain(), *parts)).encode()).hexdigest()[:24]


def _prefix(flags: tuple[str, ...]) -> Path:
    """A header of all C++ headers and shims, precompiled: most of the time goes there."""
    header = _cache() / f"prefix-{_key(*flags)}.h"
    precompiled = header.with_suffix(".h.gch")
    text = f'#include "{SHIMS / "host.h"}"\n'
    with _one_prefix:
        if not precompiled.exists():
            header.write_text(text, "ascii")
            _compile(header, precompiled, (*flags, "-x", "c++-header"))
    return header


def _runtime() -> Path:
    """The code that runs all kernels: a shared object that theirs are linked with."""
    flags = ("-shared", *_machine_flags(), "-O2")
    target = _cache() / f"runtime-{_key(*flags)}.so"
    with _one_prefix:
        if not target.exists():
            _compile(SHIMS / "emulator.cpp", target, flags)
    return target


def _compile(source: Path, target: Path, flags: tuple[str, ...], *libraries: str) -> None:
    # Elsewhere first, then renamed: other processes may build the same.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        scratch = Path(folder) / target.name
        command = [str(compiler()), *flags, str(source), *libraries, "-o", str(scratch)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise BuildError(run.stderr[:8000])
        scratch.replace(target)
