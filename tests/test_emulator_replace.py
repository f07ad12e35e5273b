"""The kernel that puts a new row in the place of the worst, run by the emulator."""

from __future__ import annotations

import os
from functools import partial

import mlx.core as mx
import pytest

from emulator import EmulatorBackend, metal_kernel
from emulator.build import compiler
from emulator.row_cases import (
    ROWS,
    in_every_schedule,
    on_the_emulator,
    rows_with_ties,
    same_bits,
)
from mlx_h2o import fast, use_backend
from mlx_h2o.operations import composed_cache, cuda, metal
from mlx_h2o.operations.requests import ReplaceRequest

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(
        compiler() is None and os.environ.get("CI") != "true",
        reason="no C++ compiler found (g++ or clang++)",
    ),
]


def arguments(seed: int, rows: int, heads: int = 4, dtype: mx.Dtype = mx.float32):
    """Keys, values, importance, positions, and the new key and value of each head."""
    importance, positions = rows_with_ties(seed, heads, rows)
    mx.random.seed(seed)

    def normal(count: int, size: int) -> mx.array:
        return mx.random.normal((2, heads, count, size)).astype(dtype)

    return (normal(rows, 8), normal(rows, 16), importance, positions, normal(1, 8), normal(1, 16))


RANKS = ("importance", "age", "key_diversity", "array")


def options(ranks: str, rows: int, **zones: int) -> dict[str, object]:
    of = rows_with_ties(9, 4, rows)[0] if ranks == "array" else ranks
    return {"position": 3 * rows + 1, "ranks": of} | zones


@pytest.mark.slow
@pytest.mark.matrix(12)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("rows", ROWS)
def test_equals_the_composition(rows: int, ranks: str) -> None:
    given = arguments(1, rows)
    zones = {"sink_size": rows // 8, "recent_start": 3 * rows - rows // 4}
    for zone in ({}, zones):
        call = partial(fast.replace_worst, *given, **options(ranks, rows, **zone))
        found = in_every_schedule(call)
        with use_backend("composed"):
            assert all(map(same_bits, found, call()))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_any_dtype_and_any_strides(dtype: mx.Dtype) -> None:
    given = arguments(2, 40, dtype=dtype)
    apart = [mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2) for a in given]
    for ranks in RANKS:
        call = partial(fast.replace_worst, *apart, **options(ranks, 40))
        with use_backend("composed"):
            expected = fast.replace_worst(*given, **options(ranks, 40))
        assert all(map(same_bits, on_the_emulator(call), expected))


@pytest.mark.slow
def test_ages_beyond_what_float32_holds() -> None:
    """Positions that float32 cannot tell apart: the age of each is exact."""
    start = 2**24
    positions = mx.array([[[start + 3, start + 1, start + 2, start + 5]]], mx.int32)
    rows, new = mx.zeros((1, 1, 4, 8)), mx.ones((1, 1, 1, 8))
    call = partial(
        fast.replace_worst, rows, rows, mx.zeros((1, 1, 4)), positions, new, new,
        position=start + 6, ranks="age",
    )  # fmt: skip
    found = on_the_emulator(call)[3]
    assert found.tolist() == [[[start + 3, start + 6, start + 2, start + 5]]]


def test_it_takes_one_launch_and_two_scatters() -> None:
    launches = []

    def note(source: str) -> str:
        launches.append(source)
        return source

    given = arguments(3, 40)
    call = partial(fast.replace_worst, *given, **options("age", 40))
    on_the_emulator(call, EmulatorBackend(edit_source=note))
    assert len(launches) == 1
    scatters = []
    put = mx.put_along_axis

    def counted(array: mx.array, *rest, **named) -> mx.array:
        scatters.append(array.shape)
        return put(array, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "put_along_axis", counted)
        on_the_emulator(call)
    assert scatters == [given[0].shape, given[1].shape]


@pytest.mark.parametrize("ranks", RANKS)
def test_each_sequence_has_its_own_clock(ranks: str) -> None:
    given = arguments(7, 40)
    clocks = {"position": mx.array([121, 30]), "recent_start": mx.array([100, 9])}
    call = partial(fast.replace_worst, *given, **options(ranks, 40, sink_size=2) | clocks)
    found = in_every_schedule(call)
    with use_backend("composed"):
        assert all(map(same_bits, found, call()))


@pytest.mark.parametrize("ranks", RANKS)
def test_metal_back_end_replaces(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """metal.py, with the emulator in the place of mx.fast.metal_kernel and of a GPU."""
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    monkeypatch.setattr(metal._rows, "_serves", lambda stream: True)
    metal._metal_kernel.cache_clear()
    request = ReplaceRequest(*arguments(5, 40), **options(ranks, 40))
    assert all(map(same_bits, metal.replace_worst(request), composed_cache.replace_worst(request)))
    assert metal._metal_kernel.cache_info().currsize == 1
    metal._metal_kernel.cache_clear()


@pytest.mark.parametrize("backend", [metal, cuda], ids=["metal", "cuda"])
def test_on_a_cpu_stream_the_composition_replaces(backend) -> None:
    request = ReplaceRequest(*arguments(6, 40), **options("age", 40), stream=mx.Device(mx.cpu))
    found = backend.replace_worst(request)
    assert all(map(same_bits, found, composed_cache.replace_worst(request)))
