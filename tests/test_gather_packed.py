"""Chunk eviction on packed rows: selected and gathered as they are, never unpacked."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import fast, use_backend
from mlx_h2o.operations import buffers


@pytest.fixture
def _no_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("rows were packed or unpacked")

    monkeypatch.setattr(mx, "quantize", refuse)
    monkeypatch.setattr(mx, "dequantize", refuse)


def packed_rows(bits: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    rows = mx.random.normal((2, 3, 40, 128), key=mx.random.key(bits)).astype(dtype)
    packed: tuple[mx.array, mx.array, mx.array] = mx.quantize(rows, group_size=32, bits=bits)
    return packed


@pytest.mark.parametrize("backend", [None, "composed"])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_packed_rows_keep_their_bits(bits: int, backend: str | None, request) -> None:
    packed = packed_rows(bits, (mx.float32, mx.float16, mx.bfloat16)[bits % 3])
    request.getfixturevalue("_no_packing")
    rng = np.random.default_rng(bits)
    scores = mx.array(rng.random((2, 3, 40)).astype(np.float32))
    positions = mx.array(np.argsort(rng.random((2, 3, 40))).astype(np.int32))
    with use_backend(backend):
        slots = fast.keep_indices(scores, positions, keep=17, sink_size=2)
    for part in packed:
        found = buffers.gathered(part, slots)
        assert found.dtype == part.dtype and found.shape == (2, 3, 17, part.shape[3])
        # Bytes: bfloat16 has no counterpart in NumPy.
        rows, kept = (np.array(mx.contiguous(a).view(mx.uint8)) for a in (part, found))
        for head in np.ndindex(2, 3):
            assert np.array_equal(kept[head], rows[head][np.array(slots[head])])


@pytest.mark.usefixtures("_no_packing")
def test_the_guard_guards() -> None:
    with pytest.raises(AssertionError, match="packed or unpacked"):
        packed_rows(4, mx.float32)
