"""Packed rows and key statistics of a replacement, by the kernels on the emulator."""

from __future__ import annotations

import os
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

import reference
from emulator import EmulatorBackend, KernelError, Run, metal_kernel
from emulator.build import compiler
from emulator.row_cases import SCHEDULES, in_every_schedule, on_the_emulator, same_bits
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


def dense(keys, packing) -> np.ndarray:
    if packing is None:
        return reference.float64(keys)
    return reference.dequantized(*keys, bits=packing[0], group_size=packing[2])


def statistics_of(keys, packing) -> tuple[np.ndarray, np.ndarray]:
    wide = dense(keys, packing)
    norms = 1 / np.maximum(np.sqrt((wide**2).sum(-1)), 1e-12)
    return (wide * norms[..., None]).sum(2), norms


def close(found, expected) -> bool:
    return all(
        np.allclose(np.array(one), other, rtol=2e-6, atol=2e-6)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("known", [False, True], ids=["chosen", "known"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_rows_and_statistics(packing, dtype: mx.Dtype, known: bool) -> None:
    given = arguments(packing, dtype)
    slots = reference.evict_indices(given[2], given[3], sink_size=3)
    settings = settings_of(packing)
    how = {"worst": mx.array(slots[..., 0].astype(np.uint32))} if known else {"sink_size": 3}
    with use_backend("composed"):
        before = fast.key_statistics(
            given[0], **({} if packing is None else {"bits": packing[0], "group_size": packing[2]})
        )
    call = partial(fast.replace_worst, *given, position=90, statistics=before, **how, **settings)
    found = in_every_schedule(lambda: [a for each in call() for a in parts(each)])
    expected = expected_of(given, packing, slots)
    assert all(map(same_bits, found[: len(expected)], expected))
    with use_backend("composed"):
        marks = call()[2:4]
    assert all(map(same_bits, found[len(expected) : -2], marks))
    keys = tuple(expected[:3]) if packing is not None else expected[0]
    assert close(found[-2:], statistics_of(keys, packing))


@pytest.mark.parametrize("width", [32, 96, 128, 576])
def test_every_width(width: int) -> None:
    for packing in (None, (4, 4, 32)):
        given = arguments(packing, mx.float16, width, 5)
        with use_backend("composed"):
            options = {} if packing is None else {"bits": 4, "group_size": 32}
            before = fast.key_statistics(given[0], **options)
        call = partial(fast.replace_worst, *given, position=9, statistics=before, **options)
        keys, *_, key_sum, norms = on_the_emulator(call)
        assert close((key_sum, norms), statistics_of(keys, packing))


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 255, 256, 257])
def test_every_number_of_rows_many_times(rows: int) -> None:
    """Twenty rows in turn: the sums are those of the rows that are there in the end."""
    keys, values, importance, positions, *_ = arguments(None, mx.float32, 32, rows)
    with use_backend("composed"):
        statistics = fast.key_statistics(keys)
    rng = np.random.default_rng(rows)
    for position in range(rows, rows + 20):
        new = [
            mx.array(rng.standard_normal((2, 3, 1, size)).astype(np.float32)) for size in (32, 64)
        ]
        call = partial(
            fast.replace_worst, keys, values, importance, positions, *new,
            position=position, ranks="age", statistics=statistics,
        )  # fmt: skip
        keys, values, importance, positions, *statistics = on_the_emulator(call)
        statistics = tuple(statistics)
    assert close(statistics, statistics_of(keys, None))


def test_a_key_of_zeros_and_other_head_sizes() -> None:
    for width in (32, 40):
        keys, values, importance, positions, new, new_values = arguments(None, width=width, rows=5)
        keys[:, :, 2] = 0
        with use_backend("composed"):
            before = fast.key_statistics(keys)
        given = (keys, values, importance, positions, mx.zeros_like(new), new_values)
        call = partial(fast.replace_worst, *given, position=9, statistics=before)
        keys, *_, key_sum, norms = on_the_emulator(call)
        assert close((key_sum, norms), statistics_of(keys, None))
        assert norms.max() == np.float32(1e12)


def test_launches_of_a_packed_step() -> None:
    """One chooses, one packs, one updates; MLX scatters six arrays and quantises nothing."""
    names = []
    packing = (8, 4, 32)
    given = arguments(packing)
    with use_backend("composed"):
        before = fast.key_statistics(given[0], bits=8, group_size=32)

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

    call = partial(
        fast.replace_worst, *given, position=90, statistics=before, **settings_of(packing)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "quantize", refuse)
        patch.setattr(mx, "dequantize", refuse)
        patch.setattr(mx, "put_along_axis", counted)
        on_the_emulator(call, Noting())
    assert names == ["h2o_replace_row", "h2o_pack_rows", "h2o_update_statistics_quantized"]
    assert scatters == [part.shape for side in given[:2] for part in side]


FAULTS = {
    "row != slot": "row == slot",
    "new_norm - old_key[j]": "new_norm + old_key[j]",
    "int64_t(batch_head) * D": "int64_t(head) * D",
    "copy_start + slot": "copy_start",
    "metal::max(metal::precise::sqrt(squares), H2O_LEAST_NORM)": "metal::precise::sqrt(squares)",
    "key_words_strides, batch, head, slot, 0": "key_words_strides, batch, head, 0, 0",
    "lane * KEY_PART, new_key": "0, new_key",
    "lane * KEY_PART + j": "lane + j * LANES",
    "int64_t(batch_head) * row_count": "int64_t(batch_head) * head_count",
}


@pytest.mark.parametrize("old", FAULTS)
def test_faults_are_caught(old: str) -> None:
    edited = []

    def edit(source: str) -> str:
        edited.append(old in source)
        return source.replace(old, FAULTS[old]) if "new_inverse_norms" in source else source

    def caught(packing, run: Run) -> bool:
        *given, new, new_values = arguments(packing)
        new[0] = 0
        given = (*given, new, new_values)
        options = settings_of(packing)
        with use_backend("composed"):
            named = {} if packing is None else {"bits": 4, "group_size": 32}
            before = fast.key_statistics(given[0], **named)
        call = partial(fast.replace_worst, *given, position=90, statistics=before, **options)
        try:
            keys, *_, key_sum, norms = on_the_emulator(call, EmulatorBackend(run, edit_source=edit))
        except KernelError:
            return True
        return not close((key_sum, norms), statistics_of(keys, packing))

    assert any(caught(packing, run) for packing in (None, (4, 8, 32)) for run in SCHEDULES[:2])
    assert any(edited)


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
