"""Rows that take the places of others: every back end as the composition, and what is refused."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import use_backend
from mlx_h2o.operations import native
from mlx_h2o.operations.row_exchange import RowExchange, exchange_rows

NATIVE = pytest.mark.skipif(bool(native.unavailable_reason()), reason="no native back end")


def arrays(seed: int, rows: int = 20):
    """Two buffers of other widths and dtypes, distinct slots, and new rows, some not contiguous."""
    rng = np.random.default_rng(seed)
    buffers = [
        mx.array(rng.standard_normal((2, 3, rows, 8)).astype(np.float32)),
        mx.array(rng.integers(0, 2**16, (2, 3, rows, 5)).astype(np.uint32)),
        mx.array(rng.standard_normal((2, 3, rows, 4))).astype(mx.bfloat16),
    ]
    order = np.argsort(rng.random((2, 3, rows - 4)), axis=2)[:, :, :4].astype(np.uint32)
    new = [
        mx.array(np.array(b.astype(mx.float32))[:, ::-1, :4].copy()).astype(b.dtype)
        for b in buffers
    ]
    new[0] = mx.swapaxes(mx.contiguous(mx.swapaxes(new[0], 1, 2)), 1, 2)
    return buffers, mx.array(order), new


@NATIVE
@pytest.mark.parametrize("start", [None, 0, 16])
@pytest.mark.parametrize("held", [False, True])
def test_the_native_rows_are_those_of_the_composition(start, held):
    found = {}
    for backend in ("composed", "native"):
        buffers, slots, rows = arrays(1)
        keep = list(buffers) if held else []
        before = [np.array(b.astype(mx.float32)) for b in buffers]
        with use_backend(backend):
            request = RowExchange(buffers, slots, rows if start is None else None, start or 0)
            new, old = exchange_rows(request)
            found[backend] = [np.array(a.astype(mx.float32)) for a in (*new, *old)]
        for array, expected in zip(keep, before, strict=False):
            np.testing.assert_array_equal(np.array(array.astype(mx.float32)), expected)
        index = np.array(slots)[..., None]
        for array, expected in zip(found[backend][3:], before, strict=True):
            there = np.take_along_axis(expected, np.broadcast_to(index, array.shape), axis=2)
            np.testing.assert_array_equal(array, there)
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(one, other)


@NATIVE
def test_a_row_may_take_its_own_place():
    buffers, _, _ = arrays(2)
    slots = mx.full((2, 3, 1), 19, mx.uint32)
    with use_backend("native"):
        new, old = exchange_rows(RowExchange([buffers[0] + 0], slots, None, 19))
    np.testing.assert_array_equal(np.array(new[0]), np.array(buffers[0]))
    np.testing.assert_array_equal(np.array(old[0]), np.array(buffers[0])[:, :, 19:])


@NATIVE
def test_what_does_not_fit_is_refused():
    buffers, slots, rows = arrays(3)
    wrong = (
        ((buffers, slots, rows[:2], 0), "found 3 buffers and 2 arrays of rows, expected as many"),
        ((buffers, slots.astype(mx.int32), rows, 0), "slots are int32, expected uint32"),
        ((buffers, slots[:1], rows, 0), r"a buffer has shape .* expected the same B and H"),
        ((buffers, slots, [], 17), "start is 17 for 4 rows of a buffer of 20, expected them"),
        ((buffers, slots, [rows[1], rows[1], rows[2]], 0), "rows are uint32 .* expected float32"),
        ((buffers, slots[0], rows, 0), r"slots .*3 \[B, H, n\]"),
    )
    for (given, places, new, start), said in wrong:
        with pytest.raises(ValueError, match=r"\[exchange_rows\] .*" + said):
            native._module().exchange_rows(given, places, new, start=start)
