"""The C interface as source: headers, public calls only, the Metal path, seeded faults, example."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import c_api
import c_api_build
import c_api_golden
from c_api import CODES, CError, Library
from c_api_headers import INCLUDE, ROOT, declarations
from mlx_h2o import kernels, launch, validate


@pytest.fixture(scope="module")
def library() -> Library:
    return c_api.required()


@pytest.fixture(scope="module")
def objects(library: Library, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Compiled with the public headers alone: no C++ header of MLX is on the path."""
    return c_api_build.compile_all(tmp_path_factory.mktemp("h2o"))


HEADERS = sorted(str(path.relative_to(root)) for root in INCLUDE for path in root.rglob("*.h"))


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
    names = re.findall(r"\b(_?mlx_\w+)\(", re.sub(r"/\*.*?\*/", "", declarations(), flags=16))
    assert len(names) > 300 and len(set(names)) == len(names)
    for name in names:
        assert getattr(library.c, name)


def test_public_calls_alone_are_enough(objects: dict[str, Path], tmp_path: Path) -> None:
    built = c_api_build.link(tmp_path, "public", list(objects.values()))
    assert built.backend_status("native") == (False, "this build has no native kernels")
    assert c_api_golden.failures(built) == []
    with pytest.raises(CError, match="back end 'native' is not available: this build has no"):
        built.check(built.c.mlx_h2o_set_backend(b"native"))


MUTANTS = {
    "causal is off by one": (
        "composed.cpp",
        "range(r.rows - r.length, r.rows, MLX_INT32, s)",
        "range(r.rows - r.length + 1, r.rows + 1, MLX_INT32, s)",
    ),
    "a fully masked query gives NaN": (
        "composed.cpp",
        "call(mlx_where, nothing, number(0), peak, s)",
        "call(mlx_where, nothing, number(-INFINITY), peak, s)",
    ),
    "the sink is left out": ("composed.cpp", "if (!sinks.empty())", "if (false)"),
    "lowest finite values do not mask": (
        "request.cpp",
        "request.mask_threshold = mask_threshold(request.mask_dtype);",
        "request.mask_threshold = 4 * mask_threshold(request.mask_dtype);",
    ),
    "ties keep the higher position": (
        "composed.cpp",
        "call(mlx_bitwise_or, upper, call(mlx_astype, place, MLX_UINT64, s), s)",
        "call(mlx_subtract, upper, call(mlx_astype, place, MLX_UINT64, s), s)",
    ),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_seeded_faults_are_caught(objects: dict[str, Path], tmp_path: Path, fault: str) -> None:
    name, before, after = MUTANTS[fault]
    patched = c_api_build.compile_patched(tmp_path, name, before, after)
    mutant = c_api_build.link(
        tmp_path, "mutant", [patched, *(objects[n] for n in objects if n != name)]
    )
    with mutant.using("composed"):
        assert c_api_golden.failures(mutant) != []


def test_a_failure_in_the_middle_is_reported_once(objects: dict[str, Path], tmp_path: Path) -> None:
    fake = c_api_build.compile_one(c_api_build.FAKES / "failing_mlx.cpp", tmp_path / "failing.o")
    failing = c_api_build.link(tmp_path, "failing", [fake, *objects.values()])
    failing.ffi.cdef("void fail_at(int n);")
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
            error_of(lambda: failing.select("keep", scores, positions, 32), n),
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


def recorded(library: Library) -> dict[str, list[str]]:
    """What the fake Metal device was given since the last call."""
    text = library.ffi.string(library.c.fake_metal_record()).decode()
    found: dict[str, list[str]] = {}
    for line in text.split("\x1e")[:-1]:
        key, value = line.split("\x1f")
        found.setdefault(key, []).append(value)
    return found


def planned(request: validate.AttentionRequest) -> dict[str, list[str]]:
    """The same record of the launch that the Python package plans."""

    def words(numbers) -> str:
        return " ".join(str(int(number)) for number in numbers)

    def code(dtype: mx.Dtype) -> int:
        return CODES[str(dtype).removeprefix("mlx.core.")]

    (plan,) = launch.plan(request).passes  # C runs in one pass
    record = {
        "name": [plan.kernel.name],
        "inputs": [" ".join(plan.kernel.inputs)],
        "outputs": [" ".join(plan.kernel.outputs)],
        "source": [plan.kernel.source],
        "header": [kernels.HEADER],
        "switches": ["0 0"],
        "grid": [words(plan.grid)],
        "threadgroup": [words(plan.threadgroup)],
        "input": [words(array.shape) for array in plan.inputs({})],
        "output": [
            f"{words(shape)}:{code(dtype)}"
            for shape, dtype in zip(plan.output_shapes, plan.output_dtypes, strict=True)
        ],
    }
    for name, value in plan.template:
        number = code(value) if isinstance(value, mx.Dtype) else int(value)
        record[f"template {name}"] = [str(number)]
    return record


@pytest.fixture(scope="module")
def metal(objects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The H2O part on the fake Metal device."""
    directory = tmp_path_factory.mktemp("metal")
    fake = c_api_build.compile_one(c_api_build.FAKES / "fake_metal.cpp", directory / "fake.o")
    built = c_api_build.link(directory, "metal", [fake, *objects.values()])
    built.ffi.cdef("const char* fake_metal_record(void); int fake_metal_kernels_made(void);")
    return built


def test_metal_launches_are_those_of_the_python_package(metal: Library) -> None:
    assert metal.backend_status("metal") == (True, "")
    masks = {
        "none": None,
        "causal": "causal",
        "bool": mx.ones((3, 40), mx.bool_),
        "additive": mx.zeros((2, 1, 1, 40), mx.bfloat16),
    }
    sizes = ((32, 32), (128, 128), (192, 128), (512, 512), (576, 512))
    cases = 0
    for mask in masks.values():
        for dtype in (mx.float32, mx.float16, mx.bfloat16):
            for with_sinks, return_lse in ((False, False), (True, False), (True, True)):
                d, dv = sizes[cases % len(sizes)]
                cases += 1
                shapes = ((2, 4, 3, d), (2, 2, 40, d), (2, 2, 40, dv))
                arrays = [mx.zeros(shape, dtype) for shape in shapes]
                sinks = mx.zeros((4,), mx.float16) if with_sinks else None
                more = {"scale": 0.25, "return_lse": return_lse}
                request = validate.attention_request(*arrays, mask=mask, sinks=sinks, **more)
                results = metal.attention(
                    *map(metal.array, arrays),
                    mask=metal.array(mask) if isinstance(mask, mx.array) else mask,
                    sinks=None if sinks is None else metal.array(sinks),
                    **more,
                )
                assert recorded(metal) == planned(request)
                shape = metal.numpy(results["scores"]).shape
                assert shape == (2, 4, 3, 40) and metal.numpy(results["out"]).shape[-1] == dv
    assert cases == 36 and metal.c.fake_metal_kernels_made() == 9


REFUSED = {
    "decode kernels take up to 8 queries, found Lq = 9": (9, 32, 32),
    "the kernels take head sizes that are multiples of 32 up to 576, found D = 40": (1, 40, 32),
    "the kernels take head sizes that are multiples of 32 up to 576, found Dv = 608": (1, 32, 608),
}


@pytest.mark.parametrize("text", REFUSED)
def test_metal_refuses_in_the_words_of_the_python_package(metal: Library, text: str) -> None:
    length, d, dv = REFUSED[text]
    arrays = [mx.zeros(shape) for shape in ((1, 1, length, d), (1, 1, 9, d), (1, 1, 9, dv))]
    request = validate.attention_request(*arrays, scale=1.0)
    assert launch.refuses(request) == text
    handles = [metal.array(array) for array in arrays]
    with pytest.raises(CError) as caught, metal.using("metal"):
        metal.attention(*handles, scale=1.0)
    op = validate.ATTENTION
    assert str(caught.value) == f"[{op}] back end 'metal' cannot serve this call: {text}"
    metal.attention(*handles, scale=1.0)
    assert recorded(metal) == {}  # unnamed, it was composed


def test_the_example_builds_and_runs(library: Library, tmp_path: Path) -> None:
    source = ROOT / "examples" / "c" / "attention.c"
    base = c_api.library_path()
    assert base is not None
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
