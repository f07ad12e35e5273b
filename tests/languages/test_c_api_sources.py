"""The C interface as source: headers, public calls only, failures halfway, the example."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import c_api_build
from c_api import CError, Library
from c_api_headers import INCLUDE, ROOT, functions
from golden.make import read
from parity.c_leg import failures

HEADERS = sorted(str(path.relative_to(root)) for root in INCLUDE for path in root.rglob("*.h"))


@pytest.mark.slow
@pytest.mark.parametrize("language", ["c99", "c++11"])
def test_headers_compile_alone(language: str, tmp_path: Path) -> None:
    kind = "c++" if "+" in language else "c"
    c_api_build.compiler(kind)
    for compiler in c_api_build.compilers(kind):
        for header in HEADERS:
            source = tmp_path / f"one.{'cpp' if kind == 'c++' else 'c'}"
            source.write_text(f'#include "{header}"\n#include "{header}"\nint main(void) {{}}\n')
            flags = (f"-std={language}", *c_api_build.WARNINGS, "-fsyntax-only")
            c_api_build.run(compiler, *flags, *(f"-I{path}" for path in INCLUDE), source)


def test_every_declared_function_is_exported(library: Library) -> None:
    names = functions()
    assert len(names) > 300 and len(set(names)) == len(names)
    for name in names:
        assert getattr(library.c, name)


def test_public_calls_alone_are_enough(
    library: Library, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Compiled with the public headers alone: no C++ header of MLX is on the path."""
    built = c_api_build.link(tmp_path, "public", c_api_build.whole(tmp_path_factory))
    assert built.backend_status("native") == (False, "this build has no native kernels")
    assert failures(built, read()) == []
    with pytest.raises(CError, match="back end 'native' is not available: this build has no"):
        built.check(built.c.mlx_h2o_set_backend(b"native"))


def test_a_failure_in_the_middle_is_reported_once(
    library: Library, tmp_path_factory: pytest.TempPathFactory
) -> None:
    failing = c_api_build.faked(tmp_path_factory, "failing_mlx", declared="void fail_at(int n);")
    rng = np.random.default_rng(0)
    q, k, v = (failing.array(rng.standard_normal(s).astype(np.float32)) for s in [(1, 2, 3, 8)] * 3)
    sinks = failing.array(np.zeros(2, np.float32))
    scores = failing.array(rng.standard_normal((1, 2, 64)).astype(np.float32))
    positions = failing.array(np.tile(np.arange(64), (1, 2, 1)), "int32")
    memory = failing.ffi.new("size_t*")

    def error_of(operation: Callable[[], object], n: int) -> str:
        failing.c.fail_at(n)
        try:
            operation()
        except CError as error:
            return str(error)
        finally:
            failing.c.fail_at(-1)
        return ""

    def attempt(n: int) -> bool:
        """Whether both operations went through with the n-th call failing."""
        errors = (
            error_of(lambda: failing.attention(q, k, v, scale=1.0, sinks=sinks), n),
            error_of(lambda: failing.keep_indices(scores, positions, 32), n),
        )
        assert all(re.fullmatch(r"|\[mlx_\w+\] seeded", error) for error in errors)
        return not any(errors)

    failures = next(n for n in range(100) if attempt(n))
    assert failures >= 7
    failing.check(failing.c.mlx_get_active_memory(memory))
    before = memory[0]
    for _ in range(200):
        for n in range(failures):
            attempt(n)
    failing.check(failing.c.mlx_get_active_memory(memory))
    assert memory[0] == before


def test_the_example_builds_and_runs(library: Library, tmp_path: Path) -> None:
    source = ROOT / "examples" / "c" / "attention.c"
    base = library.path
    for compiler in c_api_build.compilers("c"):
        program = tmp_path / "attention"
        flags = ("-std=c99", *c_api_build.WARNINGS, *(f"-I{path}" for path in INCLUDE))
        libraries = (f"-L{base.parent}", "-lmlxh2oc", "-lm", f"-Wl,-rpath,{base.parent.resolve()}")
        c_api_build.run(compiler, *flags, source, "-o", program, *libraries)
        printed = c_api_build.run(program)
        lines = [line.split(": ") for line in printed.splitlines()]
        assert [head for head, _ in lines] == ["head 0 kept", "head 1 kept"]
        for _, slots in lines:
            kept = list(map(int, slots.split()))
            assert len(kept) == 8 and {0, 1, 12, 13, 14, 15} < set(kept)
