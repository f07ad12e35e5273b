"""Dense and packed rows of a replacement, by the kernels on the emulator."""

from __future__ import annotations

import os
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

import reference
from emulator import EmulatorBackend, metal_kernel
from emulator.build import compiler
from emulator.row_cases import in_every_schedule, on_the_emulator, same_bits
from mlx_h2o import fast, use_backend
from mlx_h2o.operations import metal

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(
        compiler() is None and os.environ.get("CI") != "true",
        reason="no C++ compiler found (g++ or clang++)",
    ),
]

PACKINGS = (None, (8, 8, 64), (4, 8, 32), (3, 6, 64))
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
ROWS = 37


def settings_of(packing) -> dict[str, int]:
    return {} if packing is None else {"bits": packing[0], "v_bits": packing[1]} | {
        "group_size": packing[2]
    }  # fmt: skip


def parts(rows) -> tuple[mx.array, ...]:
    return rows if isinstance(rows, tuple) else (rows,)


def arguments(packing, dtype: mx.Dtype = mx.float16, width: int = 64, rows: int = ROWS):
    """Keys, values, importance, positions and new rows of a batch of 2 with 3 heads."""
    rng = np.random.default_rng([width, rows])

    def normal(count: int, size: int) -> mx.array:
        drawn = rng.standard_normal((2, 3, count, size)).astype(np.float32)
        return mx.array(drawn).astype(dtype)

    stored = [normal(rows, width), normal(rows, 2 * width)]
    if packing is not None:
        stored = [
            tuple(mx.quantize(each, group_size=packing[2], bits=bits))
            for each, bits in zip(stored, packing[:2], strict=True)
        ]
    importance = mx.array(rng.random((2, 3, rows)).astype(np.float32))
    positions = mx.array(np.argsort(rng.random((2, 3, rows))).astype(np.int32))
    return (*stored, importance, positions, normal(1, width), normal(1, 2 * width))


def expected_of(given, packing, slots: np.ndarray) -> list[mx.array]:
    """The stored arrays with the new row in its slots: packed by the kernel that packs rows."""
    new = given[4:]
    if packing is not None:
        backend = EmulatorBackend()
        found = backend.pack_rows(*new, **settings_of(packing))
        new = tuple(found[:3]), tuple(found[3:])
    index = mx.array(slots.astype(np.uint32))[..., None]
    return [
        mx.put_along_axis(part, mx.broadcast_to(index, row.shape), row, axis=2)
        for stored, rows in zip(given[:2], new, strict=True)
        for part, row in zip(parts(stored), parts(rows), strict=True)
    ]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("clocks", [False, True], ids=["one clock", "two clocks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_rows_of_every_kind(packing, dtype: mx.Dtype, clocks: bool) -> None:
    given = arguments(packing, dtype)
    zones = {"sink_size": 3, "recent_start": mx.array([30, 12]) if clocks else None}
    slots = reference.evict_indices(given[2], given[3], **zones)
    position = mx.array([90, 71]) if clocks else 90
    call = partial(fast.replace_worst, *given, position=position, **zones, **settings_of(packing))
    found = in_every_schedule(lambda: [a for each in call() for a in parts(each)])
    expected = expected_of(given, packing, slots)
    assert all(map(same_bits, found[: len(expected)], expected))
    with use_backend("composed"):
        marks = call()[2:4]
    assert all(map(same_bits, found[len(expected) :], marks))


@pytest.mark.slow
def test_launches_of_a_packed_step() -> None:
    """One chooses, one packs; MLX scatters six arrays and quantises nothing."""
    names = []
    packing = (8, 4, 32)
    given = arguments(packing)

    class Noting(EmulatorBackend):
        def _execute(self, each, inputs):
            names.append(each.kernel.name)
            return super()._execute(each, inputs)

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("MLX quantised or dequantised rows")

    scatters = []
    put = mx.put_along_axis

    def counted(array: mx.array, *rest, **named) -> mx.array:
        scatters.append(array.shape)
        return put(array, *rest, **named)

    call = partial(fast.replace_worst, *given, position=90, **settings_of(packing))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "quantize", refuse)
        patch.setattr(mx, "dequantize", refuse)
        patch.setattr(mx, "put_along_axis", counted)
        on_the_emulator(call, Noting())
    assert names == ["h2o_replace_row", "h2o_pack_rows"]
    assert scatters == [part.shape for side in given[:2] for part in side]


@pytest.mark.parametrize("packing", [None, (8, 4, 32)], ids=str)
def test_metal_back_end_replaces(packing, monkeypatch: pytest.MonkeyPatch) -> None:
    """metal.py, with the emulator in the place of mx.fast.metal_kernel and of a GPU."""
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    monkeypatch.setattr(metal, "unavailable_reason", lambda: "")
    monkeypatch.setattr(metal._rows, "_serves", lambda stream: True)
    metal._metal_kernel.cache_clear()
    given = arguments(packing)
    slots = reference.evict_indices(given[2], given[3])
    with use_backend("metal"):
        found = fast.replace_worst(*given, position=90, **settings_of(packing))
    expected = expected_of(given, packing, slots)
    arrays = [part for each in found[:2] for part in parts(each)]
    assert all(map(same_bits, arrays, expected))
    assert metal._metal_kernel.cache_info().currsize == (1 if packing is None else 2)
    metal._metal_kernel.cache_clear()
