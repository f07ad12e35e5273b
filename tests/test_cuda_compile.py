"""NVRTC compiles the kernels with the CUDA shim; nothing of this runs on a GPU.

MLX without CUDA does not give out the text that it would generate; tests/nvrtc.py imitates it.
"""

from __future__ import annotations

import pytest

import nvrtc
from emulator.cases import DTYPES
from emulator.variants import every_variant, request
from mlx_h2o import launch
from mlx_h2o.launch import LaunchPlan

# What one threadgroup may have in all.
REGISTERS = 65536

PLANS = {name: launch.plan(each) for name, each in every_variant()}


@pytest.fixture(scope="module", autouse=True)
def _toolkit() -> None:
    try:
        nvrtc.toolkit()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def compiled(plans: list[LaunchPlan], architecture: str = "sm_90") -> list[nvrtc.Resources]:
    """Resources of each plan's kernel; the plans have the same number of threads."""
    functions = "".join(map(nvrtc.generated_function, plans))
    found = nvrtc.compile_cuda(nvrtc.generated_header(plans[0]) + functions, architecture)
    by_plan = []
    for plan in plans:
        # Mangled: the length of the name, then the name.
        name = nvrtc.function_name(plan)
        (match,) = (each for mangled, each in found.items() if f"{len(name)}{name}" in mangled)
        by_plan.append(match)
    return by_plan


@pytest.mark.parametrize("threads", [1024, 512, 256])
def test_every_variant_compiles_and_fits(threads: int) -> None:
    plans = [plan for plan in PLANS.values() if plan.threadgroup[0] == threads]
    assert len(plans) >= 12
    for plan, needs in zip(plans, compiled(plans), strict=True):
        assert needs.registers * threads <= REGISTERS, nvrtc.function_name(plan)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_128_needs_no_memory_for_spills(dtype: str, architecture: str) -> None:
    plan = launch.plan(request(DTYPES[dtype], (128, 128), "additive", True, True, True))
    (needs,) = compiled([plan], architecture)
    assert plan.threadgroup[0] == 1024 and needs.registers <= 64 and needs.stack == 0


def test_launch_bounds_are_in_force() -> None:
    """The same kernel for more threads gets by on fewer registers."""
    wide, narrow = (
        compiled([launch.plan(request(DTYPES["f32"], (256, 256), "", False, True, False), n)])[0]
        for n in (8, 32)
    )
    assert narrow.registers <= 64 < wide.registers


def test_a_mistake_is_reported() -> None:
    plan = PLANS["f32-64x64-unmasked-sinks"]
    text = nvrtc.generated_header(plan) + nvrtc.generated_function(plan)
    with pytest.raises(RuntimeError, match="error"):
        nvrtc.compile_cuda(text.replace("metal::simd_sum", "metal::simd_total"), "sm_90")
