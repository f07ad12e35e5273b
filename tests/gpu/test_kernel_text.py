"""The packaged kernel text: in step with metal/, and within the rules of metal_kernel."""

import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from emulator import EmulatorBackend
from emulator.build import compiler
from emulator.variants import every_variant
from mlx_h2o.operations.gpu import cuda, kernels, launch
from mlx_h2o.operations.requests import AttentionRequest, attention_request
from paths import ROOT

PACKAGER = ROOT / "tools" / "package_kernels.py"

sys.path.insert(0, str(PACKAGER.parent))

import kernel_source  # noqa: E402
import package_kernels  # noqa: E402

TABLE = kernel_source.read_table(ROOT / "metal")


def flag_sets() -> Iterator[frozenset[str]]:
    """Every combination of flags that may be on together."""
    for count in range(len(TABLE.flags) + 1):
        for flags in map(frozenset, itertools.combinations(TABLE.flags, count)):
            if not any(flags.issuperset(group) for group in TABLE.exclusive):
                yield flags


NAMES = [name for family in TABLE.families for name in family.kernels]


@functools.cache
def variants(name: str) -> tuple[kernels.Kernel, ...]:
    """A kernel with every combination of its flags."""
    own = {flags.intersection(kernels.OWN_FLAGS[name]): None for flags in flag_sets()}
    return tuple(kernels.kernel_for(name, flags) for flags in own)


def test_generated_files_are_in_step() -> None:
    assert package_kernels.out_of_step(ROOT) == {}
    run = subprocess.run([sys.executable, PACKAGER, "--check"], capture_output=True, check=False)
    assert (run.returncode, run.stdout) == (0, b"")


def test_a_file_out_of_step_is_found(tmp_path: Path) -> None:
    (tmp_path / "metal").symlink_to(ROOT / "metal")
    for path, text in package_kernels.generated_files(ROOT).items():
        file = tmp_path / path
        file.parent.mkdir(parents=True)
        file.write_text(text, "utf-8")
    assert package_kernels.out_of_step(tmp_path) == {}
    changed = tmp_path / "mlx-c/h2o/kernel_text.h"
    changed.write_text(changed.read_text("utf-8").replace("metal::simd_sum", "simd_sum"), "utf-8")
    (tmp_path / "python/mlx_h2o/_kernel_text.py").unlink()
    found = package_kernels.out_of_step(tmp_path)
    assert set(found) == {"mlx-c/h2o/kernel_text.h", "python/mlx_h2o/_kernel_text.py"}
    assert "-" in found["mlx-c/h2o/kernel_text.h"]


# The first pass writes the scores, the second the log of the denominator; with sparse V the
# sweep over the values reads scores that are always there, and counts what it leaves out.
OUTPUTS_ASKED_FOR = {
    "sdpa_vector": {"scores", "lse"},
    "sdpa_vector_2pass_1": {"scores"},
    "sdpa_vector_quantized": {"scores", "lse"},
    "sdpa_vector_2pass_1_quantized": {"scores"},
    "sdpa_vector_sparse_quantized": {"lse", "skipped"},
    "sdpa_vector_sparse_keys_quantized": set(),
    "sdpa_vector_sparse_values_quantized": {"skipped"},
    "sdpa_vector_2pass_2": {"lse", "skipped"},
}


@pytest.mark.parametrize("flag", ["scores", "lse", "skipped"])
@pytest.mark.parametrize("kernel", NAMES)
def test_an_output_costs_only_its_own_lines(kernel: str, flag: str) -> None:
    assert (flag in kernels.OWN_FLAGS[kernel]) == (flag in OUTPUTS_ASKED_FOR.get(kernel, set()))
    if flag not in kernels.OWN_FLAGS[kernel]:
        return
    for flags in flag_sets():
        if flag not in flags:
            off = kernels.kernel_for(kernel, flags)
            on = kernels.kernel_for(kernel, flags | {flag})
            (added,) = {*on.outputs} - {*off.outputs}
            assert added in (flag, f"partial_{flag}")
            assert re.search(rf"\b{added}\b", on.source)
            assert not re.search(rf"\b{added}\b", off.source)
            remaining = iter(on.source.splitlines())
            assert all(line in remaining for line in off.source.splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_no_flag_is_left_in_the_text(name: str) -> None:
    for kernel in variants(name):
        assert "#" not in kernel.source and "//" not in kernel.source
        words = set(re.findall(r"\w+", kernel.source))
        assert words.isdisjoint({*TABLE.flags} - {*kernel.inputs, *kernel.outputs})
        # Dtypes keep kernels of other buffers apart in MLX's caches, even where no line names them.
        needed = {*kernel.inputs, *kernel.outputs, *kernel.template} - {"T", "S"}
        assert words.issuperset(needed), kernel.name


def forbidden(text: str) -> list[str]:
    found = re.findall(r"\bstd::|\bdouble\b|\bstatic\b|\blong\b|\[[&=]?\]\s*\(|\busing\b", text)
    return found + re.findall(r"(?<!::)\b(?:simd_\w+|threadgroup_barrier)\(", text)


def test_metal_kernel_can_take_the_header() -> None:
    assert kernels.HEADER.isascii() and kernels.CUDA_SHIM.isascii()
    assert forbidden(kernels.HEADER) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_metal_kernel_can_take_it(name: str) -> None:
    for kernel in variants(name):
        assert kernel.source.isascii()
        # MLX looks for the literal text "NAME_shape": it must not be the end of a longer name.
        extras = 0
        for base, _ in set(re.findall(r"(\w+)_(shape|strides|ndim)", kernel.source)):
            named = [array for array in kernel.inputs if base.endswith(array)]
            assert named in ([], [base])
            extras += len(named)
        assert len(kernel.inputs) + len(kernel.outputs) + extras <= 31, "Metal has 31 buffers"
        assert forbidden(kernel.source) == []


def test_names_differ_where_texts_differ() -> None:
    """MLX may keep one compiled kernel per name."""
    found = [kernel for name in NAMES for kernel in variants(name)]
    assert len({kernel.name for kernel in found}) == len(found) == len({*found})


def test_c_header_compiles_by_the_strict_rules(tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("no compiler found (g++ or clang++)")
    source = tmp_path / "use.c"
    source.write_text('#include "kernel_text.h"\nint main(void) { return 0; }\n')
    command = [compiler(), "-x", "c", "-std=c99", "-pedantic", "-Wall", "-Werror", "-fsyntax-only"]
    subprocess.run([*command, "-I", ROOT / "mlx-c/h2o", source], check=True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["#if speed", "#endif"], "body.metal:1: 'speed' is not a flag"),
        (["#if scores", "x;"], "#if scores is never closed"),
        (["#endif"], "body.metal:1: a body may not say '#endif' here"),
        (["#if scores", "#else", "#else", "#endif"], "body.metal:3: a body may not say '#else'"),
        (["#define X 1"], "a body may not say '#define X 1' here"),
    ],
)
def test_packager_refuses(lines: list[str], message: str) -> None:
    placed = [(f"body.metal:{number}", line) for number, line in enumerate(lines, 1)]
    with pytest.raises(kernel_source.KernelSourceError, match=re.escape(message)):
        kernel_source.resolve_flags(placed, ("scores", "lse"))


@pytest.mark.parametrize(("text", "message"), [("é", "is ASCII"), ("a /* b */", "written with //")])
def test_packager_refuses_the_characters(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "h2o.h").write_text(text, "utf-8")
    (tmp_path / "variants.toml").write_text(
        'flags = []\ntraits = []\nexclusive = []\nheader = "h2o.h"\n[families]\n'
    )
    with pytest.raises(kernel_source.KernelSourceError, match=message):
        kernel_source.read_table(tmp_path)


def test_flags_nest() -> None:
    text = ["a", "#if scores", "b", "#if !lse", "c", "#else", "d", "#endif", "#endif", "e"]
    segments = kernel_source.resolve_flags([("", line) for line in text], ("scores", "lse"))
    found = " / ".join(f"{one.condition}: {one.text}" for one in segments)
    assert found == ": a\n / scores: b\n / scores !lse: c\n / scores lse: d\n / : e\n"


def test_traits_and_flags_that_are_always_on_are_resolved() -> None:
    """A family's members differ by traits, of which nothing is left."""
    assert {flag for name in NAMES for flag in kernels.OWN_FLAGS[name]} == {*TABLE.flags}
    keys = kernels.kernel_for("sdpa_vector_sparse_keys_quantized", frozenset())
    assert "scores" in keys.outputs and "value" not in keys.source
    values = kernels.kernel_for("sdpa_vector_sparse_values_quantized", frozenset())
    assert "scores" in values.inputs and "key_words" not in values.source


def test_parameters_of_the_generated_function_have_the_order_of_the_table() -> None:
    for name, request, blocks in every_variant():
        plan = launch.plan(request, blocks=blocks)
        texts = EmulatorBackend(blocks=blocks).texts(request)
        for each, text in zip(plan.passes, texts, strict=True):
            own = [
                parameter
                for parameter in text.buffer_names()
                if not parameter.endswith(("_shape", "_strides", "_ndim"))
            ]
            assert own == [*each.kernel.inputs, *each.kernel.outputs], name


@pytest.mark.parametrize(
    ("keys", "group", "most"),
    [
        (1, 32, 1), (1023, 8, 1), (1024, 32, 2), (1024, 16, 4), (1024, 8, 8),
        (2047, 32, 2), (2048, 32, 4), (16383, 32, 16), (16384, 32, 32), (10**6, 32, 32),
    ],
)  # fmt: skip
def test_blocks_follow_the_bits_of_the_length(keys: int, group: int, most: int) -> None:
    assert {launch.preferred_blocks(n, group) for n in (keys, 1 << keys.bit_length() - 1)} == {most}


def test_wide_heads_get_fewer_simdgroups() -> None:
    sizes = (128, 128), (192, 128), (256, 256), (512, 512), (576, 512)
    assert [launch.preferred_simdgroups(*one) for one in sizes] == [32, 16, 16, 8, 8]


def test_launches_are_what_a_request_asks_for() -> None:
    rows, wide = [mx.zeros((1, 1, 1, 64))] * 3, mx.zeros((1, 1, 1, 72))
    plans = [launch.plan(AttentionRequest(*rows, 1.0), blocks=n) for n in (1, 2, 3)]
    assert [len(one.passes) for one in plans] == [1, 2, 2]
    for asked, threshold in ((True, 0.0), (False, 0.1), (True, 0.1)):
        given = {"sparse_v_threshold": threshold, "return_skipped": asked}
        flags = launch.flags_of(AttentionRequest(*rows, 1.0, **given))
        assert ("skipped" in flags) == (asked and threshold > 0)
    assert "found D = 72" in launch.refuses(AttentionRequest(wide, wide, rows[0], 1.0))
    assert "found Dv = 72" in launch.refuses(AttentionRequest(*rows[:2], wide, 1.0))


def test_cuda_header_comes_with_its_launch_bounds() -> None:
    header = cuda.BACKEND.header(512)
    assert header.startswith("#define H2O_MAX_THREADS 512\n")
    assert header.index("__launch_bounds__") < header.index("h2o_softmax")


def test_cuda_back_end_says_why_it_cannot() -> None:
    if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
        assert "no CUDA device" in cuda.BACKEND.unavailable_reason()
    q = mx.zeros((1, 1, 1, 32))
    request = attention_request(q, q, q, scale=1.0)
    if mx.default_device().type == mx.DeviceType.cpu:
        assert "found a CPU stream" in cuda.BACKEND.refuses(request)
