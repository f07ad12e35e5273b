"""NVRTC compiles the kernels with the CUDA shim; nothing here runs on a GPU.

MLX without CUDA does not show the text that it would generate; tests/lib/nvrtc.py imitates it.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest

import nvrtc
from emulator.backend import stand_ins
from emulator.cases import DTYPES, Case
from emulator.rows import every_row_launch
from emulator.variants import every_variant
from mlx_h2o.operations.gpu import launch
from mlx_h2o.operations.gpu.launches import Launch
from mlx_h2o.operations.requests import AttentionRequest

# What one threadgroup may have in all.
REGISTERS = 65536

# The variants for a number of threads are compiled in this many parts. Masks, flags, widths and
# dtypes take turns by 2, 3, 4 and 6, so that the first parts together have each of them.
PARTS = 11

# Of 8 and 4 bits, and those whose words a lane's part crosses.
PACKINGS = ((8, 64), (4, 32), (4, 64), (6, 128), (3, 64))

Prepared = tuple[Launch, list[mx.array]]


def prepared(
    request: AttentionRequest, simdgroups: int | None = None, blocks: int | None = None
) -> list[Prepared]:
    """The launches for a request, each with stand-ins for its inputs."""
    return stand_ins(launch.plan(request, simdgroups, blocks))


@cache
def every_launch() -> list[Prepared]:
    """Every variant, each function once."""
    found: dict[str, Prepared] = {}
    for _, variant, blocks in every_variant():
        for each, inputs in prepared(variant, blocks=blocks):
            found.setdefault(nvrtc.function_name(each), (each, inputs))
    return [*found.values()]


@pytest.fixture(scope="module", autouse=True)
def _toolkit() -> None:
    try:
        nvrtc.toolkit()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def compiled(launches: Iterable[Prepared], architecture: str = "sm_90") -> list[nvrtc.Resources]:
    """Resources of each launch's kernel; all have the same number of threads."""
    launches = list(launches)
    functions = "".join(nvrtc.generated_function(*each) for each in launches)
    header = nvrtc.generated_header(launches[0][0])
    found = nvrtc.compile_cuda(header + functions, architecture)
    in_order = []
    for each, _ in launches:
        # Mangled: the length of the name, then the name.
        name = nvrtc.function_name(each)
        (match,) = (needs for mangled, needs in found.items() if f"{len(name)}{name}" in mangled)
        in_order.append(match)
    return in_order


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("threads", [1024, 512, 256, 32])
def test_every_variant_compiles_and_fits(threads: int, part: int) -> None:
    of_threads = [each for each in every_launch() if each[0].threadgroup[0] == threads]
    assert len(of_threads) >= 25
    launches = of_threads[part::PARTS]
    for (each, _), needs in zip(launches, compiled(launches), strict=True):
        assert needs.registers * threads <= REGISTERS, nvrtc.function_name(each)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_128_needs_no_memory_for_spills(dtype: str, architecture: str) -> None:
    full = Case(dtype=dtype, sizes=(128, 128), mask=f"add-{dtype}", sinks=dtype)
    dense = replace(full, bias=True).request()
    # A bias of packed rows, without scores: with them, or an additive mask, some kernels of two
    # passes spill 8 or 16 bytes on sm_100.
    biased = replace(full, mask="causal", bias=True, scores=False)
    packed = [
        replace(case, bits=(bits, bits), group=group, sparse=sparse, skipped=sparse > 0)
        for case, packings in ((full, PACKINGS), (biased, PACKINGS[:2]))
        for bits, group in packings
        for sparse in (0.0, 1e-6)
    ]
    launches = {
        nvrtc.function_name(each[0]): each
        for case in (dense, *(case.request() for case in packed))
        for blocks in (None, 2)
        for each in prepared(case, blocks=blocks)
        if not each[0].kernel.name.startswith("h2o_sdpa_vector_2pass_2")
    }
    found = compiled(launches.values(), architecture)
    for (name, (each, _)), needs in zip(launches.items(), found, strict=True):
        assert each.threadgroup[0] == 1024
        assert needs.registers <= 64 and needs.stack == 0, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("threads", [256, 32])
def test_kernels_on_rows_compile_and_fit(threads: int) -> None:
    launches = [
        prepared
        for name, plan in every_row_launch().items()
        for prepared in stand_ins(plan)
        if prepared[0].threadgroup[0] == threads and not name.endswith("-short")
    ]
    assert launches
    for (each, _), needs in zip(launches, compiled(launches), strict=True):
        assert needs.registers * threads <= REGISTERS and needs.stack == 0, each.kernel.name


@pytest.mark.exhaustive
def test_launch_bounds_are_in_force() -> None:
    """The same kernel for more threads uses fewer registers."""
    wide, narrow = (
        compiled(prepared(Case(sizes=(256, 256), lse=False).request(), n))[0] for n in (8, 32)
    )
    assert narrow.registers <= 64 < wide.registers


@pytest.mark.slow
def test_a_mistake_is_reported() -> None:
    each, inputs = every_launch()[0]
    text = nvrtc.generated_header(each) + nvrtc.generated_function(each, inputs)
    with pytest.raises(RuntimeError, match="error"):
        nvrtc.compile_cuda(text.replace("metal::simd_sum", "metal::simd_total"), "sm_90")
