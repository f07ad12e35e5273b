"""The kernel that packs new rows, run by the emulator, against Metal's rule in NumPy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import reference_turbo
from emulator import EmulatorBackend, Run
from emulator.cases import DTYPES
from emulator.marks import EMULATED
from emulator.row_cases import on_the_emulator
from mlx_h2o import H2OConfig, H2OKVCache, fast, use_backend
from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.gpu import metal

pytestmark = EMULATED

SCHEDULES = (Run(), Run("reverse"), Run("random", seed=1))


def half_away(x: np.ndarray) -> np.ndarray:
    """Metal's round: halves go away from zero. Float64, in which adding 0.5 is exact."""
    wide = x.astype(np.float64)
    return np.trunc(wide + np.copysign(0.5, wide)).astype(np.float32)


def metal_quantize(rows: np.ndarray, bits: int, group: int) -> list[np.ndarray]:
    """``affine_quantize`` of MLX 0.32 (backend/metal/kernels/quantized.h), in float32.

    The maximum starts at 0; the end of the range that is farther from 0 is hit exactly; scale and
    bias are rounded to the dtype of the rows only after the elements have been divided.
    """
    grouped = rows.reshape(*rows.shape[:-1], -1, group)
    most = np.float32((1 << bits) - 1)
    low = grouped.min(-1)
    high = np.maximum(grouped.max(-1), np.float32(0))
    scale = np.maximum((high - low) / most, np.float32(1e-7))
    side = np.abs(low) > np.abs(high)
    scale = np.where(side, scale, -scale)
    edge = np.where(side, low, high)
    steps = half_away(edge / scale)
    at_zero = steps == 0
    scale = np.where(at_zero, scale, edge / np.where(at_zero, np.float32(1), steps))
    bias = np.where(at_zero, np.float32(0), edge)
    levels = np.minimum(half_away((grouped - bias[..., None]) / scale[..., None]), most)
    assert levels.min() >= 0
    stream = levels.astype(np.uint8).reshape(*rows.shape, 1) >> np.arange(bits, dtype=np.uint8) & 1
    stream = stream.reshape(*rows.shape[:-1], -1).astype(np.uint8)
    words = np.packbits(stream, axis=-1, bitorder="little").view(np.uint32)
    return [words, scale, bias]


def rows_of(seed: int, dtype: str, *shape: int) -> mx.array:
    """Groups on both sides of 0, on one side, constant, of zeros, tiny, and with exact halves."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal(shape).astype(np.float32)
    groups = rows.reshape(-1, 32)
    kinds = np.arange(len(groups)) % 8
    groups[kinds == 1] = np.abs(groups[kinds == 1]) + 1
    groups[kinds == 2] = -np.abs(groups[kinds == 2]) - 1
    groups[kinds == 3] = 0.75
    groups[kinds == 4] = 0
    groups[kinds == 5] *= 1e-8
    groups[kinds == 6] = (np.arange(32) - 15) * np.float32(0.5)
    groups[kinds == 7] *= 100
    return mx.array(rows).astype(DTYPES[dtype])


def expected_of(rows: mx.array, bits: int, group: int) -> list[mx.array]:
    words, *pair = metal_quantize(np.array(rows.astype(mx.float32)), bits, group)
    return [mx.array(words), *(mx.array(each).astype(rows.dtype) for each in pair)]


def same(one: mx.array, other: mx.array) -> bool:
    """The same bits, but for the sign of zero."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(mx.array_equal(one + 0 if one.dtype != mx.uint32 else one, other))


@pytest.mark.slow
@pytest.mark.matrix(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "v_bits", "group"),
    [(8, 8, 64), (4, 4, 32), (4, 8, 64), (8, 4, 128), (2, 3, 32), (5, 6, 64)],
)
def test_packs_by_metals_rule(dtype: str, bits: int, v_bits: int, group: int) -> None:
    keys = rows_of(1, dtype, 2, 3, 5, 2 * group)
    values = rows_of(2, dtype, 2, 3, 5, 4 * group)
    settings = {"bits": bits, "v_bits": v_bits, "group_size": group}
    results = [EmulatorBackend(run).pack_rows(keys, values, **settings) for run in SCHEDULES]
    wanted = [*expected_of(keys, bits, group), *expected_of(values, v_bits, group)]
    for found in results:
        assert all(map(same, found, wanted))
    packed = results[0][:3], results[0][3:]
    for (words, *pair), wide, b in zip(packed, (keys, values), (bits, v_bits), strict=True):
        # MLX reads back what it would have packed, but for half a step, and what the scale and
        # the bias lose in their dtype; the end of the range nearer to 0 may be off it by more.
        scales, biases = (each.astype(mx.float32) for each in pair)
        back = mx.dequantize(words, scales, biases, group_size=group, bits=b)
        error = mx.abs(back - wide.astype(mx.float32)).reshape(*scales.shape, group).max(axis=-1)
        size = mx.abs(wide.astype(mx.float32)).reshape(*scales.shape, group).max(axis=-1)
        loss = {"f32": 1e-6, "f16": 2e-3, "bf16": 2e-2}[dtype]
        assert mx.all(error <= 1.01 * mx.abs(scales) + 2 * loss * size + 1e-7)


def test_the_rule_is_not_the_cpus() -> None:
    """Where they differ: a group of negative elements reaches up to 0 on Metal."""
    rows = mx.array([[[[-3.0, -2.0] * 16]]])
    metals, cpus = expected_of(rows, 4, 32), mx.quantize(rows, group_size=32, bits=4)
    assert not mx.array_equal(metals[0], cpus[0])
    np.testing.assert_allclose(np.array(metals[1]).item(), 0.2, rtol=1e-6)


@pytest.mark.slow
def test_packing_takes_any_strides() -> None:
    wide = rows_of(3, "f16", 2, 5, 3, 256)
    keys, values = wide.swapaxes(1, 2)[..., ::2], wide[..., 64:].swapaxes(1, 2)
    settings = {"bits": 4, "v_bits": 8, "group_size": 64}
    found = EmulatorBackend().pack_rows(keys, values, **settings)
    dense = EmulatorBackend().pack_rows(mx.contiguous(keys), mx.contiguous(values), **settings)
    assert all(map(mx.array_equal, found, dense))


@pytest.mark.slow
def test_keys_and_values_may_differ_in_dtype() -> None:
    keys, values = rows_of(13, "bf16", 1, 2, 3, 64), rows_of(14, "f32", 1, 2, 3, 128)
    found = EmulatorBackend().pack_rows(keys, values, bits=4, v_bits=8, group_size=64)
    assert all(map(same, found, [*expected_of(keys, 4, 64), *expected_of(values, 8, 64)]))


SETTINGS = {"bits": 8, "v_bits": 4, "group_size": 64}
SLOTS = [[[3, 8], [0, 1]], [[8, 2], [5, 4]]]


def stored() -> list[tuple[mx.array, mx.array, mx.array]]:
    """Nine packed rows of keys and values."""
    rows = rows_of(6, "f16", 2, 2, 9, 64), rows_of(7, "f16", 2, 2, 9, 128)
    return [
        tuple(mx.quantize(each, group_size=64, bits=bits, stream=mx.cpu))
        for each, bits in zip(rows, (8, 4), strict=True)
    ]


def check_appended(call) -> None:
    """``call`` writes the rows, packed by Metal's rule, into their slots and nowhere else."""
    stores = stored()
    new = rows_of(8, "f16", 2, 2, 2, 64), rows_of(9, "f16", 2, 2, 2, 128)
    found = call(*stores, *new, mx.array(SLOTS, mx.uint32), **SETTINGS)
    for side, store, rows, bits in zip(found, stores, new, (8, 4), strict=True):
        for array, before, wanted in zip(side, store, expected_of(rows, bits, 64), strict=True):
            expected, packed = np.array(before), np.array(wanted)
            for b, h, i in np.ndindex(2, 2, 2):
                expected[b, h, SLOTS[b][h][i]] = packed[b, h, i]
            assert np.array_equal(np.array(array), expected)


@pytest.mark.slow
@pytest.mark.matrix(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", turbo.BITS)
@pytest.mark.parametrize("size", [32, 64, 128, 256, 1024])
def test_encodes_by_the_format(size: int, bits: int, dtype: str) -> None:
    sizes = mx.array([[[[1e-3]], [[1.0]], [[40.0]]]])
    rows = mx.random.normal((2, 3, 5, size), key=mx.random.key(size + bits)) * sizes
    rows = rows.astype(DTYPES[dtype])
    for side, seed in reference_turbo.SEEDS.items():
        results = [EmulatorBackend(run).encode_rows(rows, bits, seed) for run in SCHEDULES]
        assert all(
            mx.array_equal(*pair)
            for found in results
            for pair in zip(found, results[0], strict=True)
        )
        reference_turbo.check_packed(*results[0], rows, bits=bits, side=side)


@pytest.mark.slow
def test_a_row_of_zeros_is_encoded() -> None:
    words, norms = EmulatorBackend().encode_rows(mx.zeros((1, 1, 2, 64)), 3, turbo.KEYS)
    assert (np.array(norms) == 0).all()
    assert (reference_turbo.unpacked(words, 3) == 3).all()  # no mean of levels is below 0


@pytest.mark.slow
def test_encoding_takes_any_strides() -> None:
    wide = rows_of(3, "f16", 2, 5, 3, 256)
    rows = wide.swapaxes(1, 2)[..., ::2]
    found = EmulatorBackend().encode_rows(rows, 3, turbo.KEYS)
    dense = EmulatorBackend().encode_rows(mx.contiguous(rows), 3, turbo.KEYS)
    assert all(map(mx.array_equal, found, dense))


def test_a_cache_encodes_with_it() -> None:
    """Prompt, steps and evictions: the rows of a cache on the composition."""

    def rows_of_a_cache() -> list[mx.array]:
        cache = H2OKVCache(H2OConfig.of(max_kv_size=24, kv_format="turbo3", policy="window"))
        rows = rows_of(21, "f32", 1, 2, 40, 64)
        for start, end in ((0, 20), *((at, at + 1) for at in range(20, 40))):
            cache.update_and_fetch(rows[:, :, start:end], rows[:, :, start:end])
        return [*cache.keys, *cache.values]

    with use_backend("composed"):
        expected = rows_of_a_cache()
    found = on_the_emulator(rows_of_a_cache)
    for one, other in zip(found, expected, strict=True):
        if one.dtype == mx.uint32:  # a code at the border of two levels may be the other one
            assert np.mean(np.array(one) != np.array(other)) < 0.02
        else:
            np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-6)


def test_metal_back_end_packs(gpu) -> None:
    gpu()
    with use_backend("metal"):
        check_appended(fast.quantize_append)
    assert metal._metal_kernel.cache_info().currsize == 1


def test_on_a_cpu_stream_the_composition_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal, "unavailable_reason", lambda: "")
    new = rows_of(8, "f16", 2, 2, 2, 64), rows_of(9, "f16", 2, 2, 2, 128)
    arguments = (*stored(), *new, mx.array(SLOTS, mx.uint32))
    results = []
    for backend in ("metal", "composed"):
        with use_backend(backend):
            results.append(fast.quantize_append(*arguments, **SETTINGS, stream=mx.cpu))
    for one, other in zip(*results, strict=True):
        assert all(map(mx.array_equal, one, other))
