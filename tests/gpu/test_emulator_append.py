"""The kernel that makes codes of new rows, run by the emulator."""

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
from mlx_h2o.operations.gpu.backend import KernelBackend

pytestmark = EMULATED

SCHEDULES = (Run(), Run("reverse"), Run("random", seed=1))


def rows_of(seed: int, dtype: str, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(DTYPES[dtype])


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


@pytest.mark.parametrize("stream", [None, mx.cpu], ids=["gpu", "cpu"])
def test_metal_back_end_encodes(gpu, stream: mx.DeviceType | None) -> None:
    """On a CPU stream the composition does."""
    gpu()
    if stream is not None:
        metal.BACKEND.serves = KernelBackend.serves.__get__(metal.BACKEND)
    rows = [rows_of(at, "f16", 2, 2, 9, 64) for at in range(3)]
    codes = [tuple(turbo.encode_rows(each, 3, turbo.KEYS)) for each in rows[:2]]
    slots, found = mx.array([[[3, 8], [0, 1]], [[8, 2], [5, 4]]], mx.uint32), []
    for backend in ("metal", "composed"):
        with use_backend(backend):
            new = rows[2][:, :, :2], rows[2][:, :, 2:4]
            keys, values = fast.quantize_append(*codes, *new, slots, bits=3, stream=stream)
        found.append([*keys, *values])
    for one, other in zip(*found, strict=True):
        assert mx.allclose(one.astype(mx.float32), other.astype(mx.float32), rtol=1e-5)
    assert metal._metal_kernel.cache_info().currsize == (stream is None)
