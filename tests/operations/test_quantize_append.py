"""quantize_append: equal to mx.quantize bit for bit, in its slots, in place where possible."""

import mlx.core as mx
import numpy as np
import pytest

import reference_turbo
from back_ends import NATIVE
from cache_checks import address
from mlx_h2o import fast, use_backend
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.composed import buffers
from mlx_h2o.operations.composed.buffers import padded

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def bits_of(array: mx.array) -> np.ndarray:
    """A copy of an array's bits."""
    kind = mx.uint32 if array.dtype.size == 4 else mx.uint16
    return np.array(array.view(kind))


def random_rows(rng, shape, dtype) -> mx.array:
    rows = rng.standard_normal(shape).astype(np.float32) * rng.choice([1e-3, 1, 300])
    kind = rng.integers(0, 6, shape[:3])
    rows[kind == 1] = 0
    rows[kind == 2] = np.abs(rows[kind == 2])
    rows[kind == 3] = 0.7  # no spread
    rows[kind == 4] = np.round(rows[kind == 4])  # values on the steps
    return mx.array(rows).astype(dtype)


def packed_and_new(seed, *, bits=8, v_bits=None, group_size=64, dtype=mx.float32, length=3):
    rng = np.random.default_rng(seed)
    rows, widths = 10, (2 * group_size, group_size)
    packed = [
        mx.quantize(random_rows(rng, (2, 3, rows, width), dtype), group_size=group_size, bits=count)
        for width, count in zip(widths, (bits, v_bits or bits), strict=True)
    ]
    new = [random_rows(rng, (2, 3, length, width), dtype) for width in widths]
    slots = np.argsort(rng.random((2, 3, rows)), axis=2)[:, :, :length].astype(np.uint32)
    return packed, new, slots


def check(packed, new, slots, *, bits=8, v_bits=None, group_size=64, **given):
    before = [[bits_of(part) for part in parts] for parts in packed]
    given |= {"bits": bits, "v_bits": v_bits, "group_size": group_size}
    found = fast.quantize_append(*map(tuple, packed), *new, mx.array(slots), **given)
    index = slots.astype(np.int64)[..., None]
    for tensor, count in enumerate((bits, v_bits or bits)):
        expected = mx.quantize(new[tensor], group_size=group_size, bits=count)
        for part in range(3):
            wanted = before[tensor][part].copy()
            np.put_along_axis(wanted, index, bits_of(expected[part]), axis=2)
            np.testing.assert_array_equal(bits_of(found[tensor][part]), wanted)
            assert found[tensor][part].dtype == packed[tensor][part].dtype
            # What the caller still holds has not changed.
            np.testing.assert_array_equal(bits_of(packed[tensor][part]), before[tensor][part])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_rows_equal_mx_quantize_bit_for_bit(backend, bits, group_size, dtype):
    for seed in range(4):
        packed, new, slots = packed_and_new(seed, bits=bits, group_size=group_size, dtype=dtype)
        check(packed, new, slots, bits=bits, group_size=group_size)


def test_views_are_read_as_they_are(backend):
    packed, new, slots = packed_and_new(10)
    turned = [mx.array(np.array(array).swapaxes(1, 2)).swapaxes(1, 2) for array in new]
    wide = [tuple(mx.repeat(part, 2, axis=2)[:, :, ::2] for part in parts) for parts in packed]
    check(wide, turned, slots)


def test_a_slot_beyond_the_end_is_the_last_row(backend):
    packed, new, slots = packed_and_new(11, length=1)
    far = fast.quantize_append(
        *map(tuple, packed), *new, mx.full(slots.shape, 2**32 - 1, mx.uint32)
    )
    last = fast.quantize_append(*map(tuple, packed), *new, mx.full(slots.shape, 9, mx.uint32))
    for one, other in zip([*far[0], *far[1]], [*last[0], *last[1]], strict=True):
        np.testing.assert_array_equal(bits_of(one), bits_of(other))


def codes_and_new():
    """Nine rows of keys and values as codes, two new ones of each, and slots."""
    rows = [mx.random.normal((2, 3, 11, size), key=mx.random.key(size)) for size in (64, 128)]
    seeds = reference_turbo.SEEDS.values()
    stored = [
        [*buffers.packed(each[:, :, :9], 2, 3, 32, seed)]
        for each, seed in zip(rows, seeds, strict=True)
    ]
    slots = np.argsort(np.random.default_rng(1).random((2, 3, 9)), axis=2)[:, :, :2]
    return stored, [each[:, :, 9:] for each in rows], slots.astype(np.uint32)


@NATIVE
@pytest.mark.parametrize(
    ("make", "bits"), [(lambda: packed_and_new(12), 8), (codes_and_new, 3)], ids=["affine", "codes"]
)
def test_the_memory_of_inputs_that_nobody_holds_is_written_in_place(make, bits):
    stored, new, slots = make()
    flat, half = [part + 0 for parts in stored for part in parts], len(stored[0])
    del stored
    mx.eval(flat)
    before = [address(part) for part in flat]
    with use_backend("native"):
        for _ in range(3):
            k, v = tuple(flat[:half]), tuple(flat[half:])
            del flat
            k, v = fast.quantize_append(k, v, *new, mx.array(slots), bits=bits)
            flat = [*k, *v]
            del k, v
            mx.eval(flat)
            mx.synchronize()
            assert [address(part) for part in flat] == before


@pytest.mark.parametrize("capacity", [10, 14])
def test_rows_from_a_slot_on(backend, capacity):
    """The operation of a cache's step, against its definition, and what is handed out with it."""
    (keys, values), new, _ = packed_and_new(30)
    stored = [*keys, *(padded(part, capacity, 0) for part in values)]
    rows = [part for array in new for part in mx.quantize(array, group_size=64, bits=8)]
    for start in (0, 4, 7):
        expected = buffers.append_rows([part[...] for part in stored], rows, start)
        found = resolve().append_rows(stored, rows, start)
        assert len(found) == len(expected) == 12
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            np.testing.assert_array_equal(bits_of(one), bits_of(other))
        stored = found[:6]


@NATIVE
def test_rows_from_a_slot_on_are_written_in_place():
    parts = [part for parts in packed_and_new(31)[0] for part in parts]
    mx.eval(parts)
    where = [address(part) for part in parts]
    with use_backend("native"):
        for start in range(4):
            rows = [mx.ones_like(part[:, :, :1]) for part in parts]
            found = resolve().append_rows(parts, rows, start)
            parts, views = found[:6], found[6:]
            del found
            mx.eval(parts, views)
            del views
    assert where == [address(part) for part in parts]


@NATIVE
@pytest.mark.parametrize("start", [-1, 8, 2**31 - 1])
def test_rows_that_do_not_fit_are_refused(start):
    packed, new, _ = packed_and_new(32)
    rows = mx.quantize(new[0], group_size=64, bits=8)
    with use_backend("native"), pytest.raises(ValueError, match=f"3 rows from slot {start} on"):
        resolve().append_rows(packed[0], rows, start)
