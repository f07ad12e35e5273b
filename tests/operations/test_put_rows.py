"""Putting rows into slots, and filling gaps with rows."""

import mlx.core as mx
import numpy as np
import pytest

from back_ends import NATIVE
from cache_checks import address
from mlx_h2o.operations.backends import get, resolve
from mlx_h2o.operations.composed import buffers

SHAPES = [(2, 3, 9, 4), (1, 2, 5)]
DTYPES = [mx.float32, mx.float16, mx.uint32, mx.uint8, mx.int64]


def given(shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """A buffer, two slots of each head, and rows in another order of axes."""
    rng = np.random.default_rng(0)
    buffer = mx.array(rng.integers(0, 99, shape)).astype(dtype)
    slots = np.stack([rng.permutation(shape[2])[:2] for _ in range(shape[0] * shape[1])])
    rows = mx.array(rng.integers(0, 99, (shape[1], shape[0], 2, *shape[3:]))).astype(dtype)
    slots = slots.reshape(*shape[:2], 2).astype(np.uint32)
    return buffer, mx.array(slots), rows.swapaxes(0, 1)


@NATIVE
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_to_their_slots(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    buffer, slots, rows = given(shape, dtype)
    before = np.array(buffer)
    found = get("native").put_rows(buffer, slots, rows)
    assert mx.array_equal(found, buffers.put_rows(buffer, slots, rows)).item()
    assert np.array_equal(np.array(buffer), before)  # somebody holds it


@NATIVE
def test_a_buffer_that_the_rows_are_made_of_is_not_copied() -> None:
    buffer, slots, _ = given((2, 3, 9, 4), mx.float32)
    place = address(buffer)
    rows = buffers.gathered(buffer, slots) + 1
    buffer = get("native").put_rows(buffer, slots, rows)
    del rows
    assert address(buffer) == place


@NATIVE
def test_what_does_not_fit_is_refused() -> None:
    buffer, slots, rows = given((2, 3, 9, 4), mx.float32)
    wrong_slots = (slots.astype(mx.int32), rows), (slots[:1], rows)
    wrong_rows = (slots, rows[:, :, :1]), (slots, rows.astype(mx.float16))
    for wrong in wrong_slots + wrong_rows:
        with pytest.raises(ValueError, match="put_rows"):
            get("native").put_rows(buffer, *wrong)


@NATIVE
def test_sizes_beyond_what_a_number_holds_are_refused() -> None:
    buffer, slots, _ = given((1, 3, 9, 4), mx.float32)
    with pytest.raises(ValueError, match="compact_rows"):
        get("native").compact_rows([buffer], slots, [0], 2**31 - 1, 1)
    with pytest.raises(ValueError, match="reserved_rows"):
        get("native").reserved_rows([2**31 - 1] * 4, mx.float32)


@pytest.mark.parametrize(("start", "tail"), [(0, 0), (7, 2), (9, 3)])
def test_rows_that_stay_close_the_gaps(backend: str, start: int, tail: int) -> None:
    """In any order, in the first slots of their sequence; behind them the tail, in its own."""
    slots = mx.broadcast_to(mx.arange(12, dtype=mx.uint32), (2, 3, 12))
    wide = mx.broadcast_to(slots[..., None], (2, 3, 12, 4)).astype(mx.float16)
    kept = [[0, 2, 3, 5, 6], [1, 2, 4, 5, 6], [0, 1, 2, 3, 4]]
    given = [mx.contiguous(slots), mx.contiguous(wide)]
    found = resolve().compact_rows(given, mx.array([kept], mx.uint32), [1], start, tail)
    for array in (found[0], found[1][..., 0], found[1][..., 3]):
        assert array[0].tolist() == slots[0].tolist()
        for head, stay in zip(array[1].tolist(), kept, strict=True):
            assert sorted(head[:5]) == stay
            assert head[5 : 5 + tail] == [*range(start, start + tail)]
