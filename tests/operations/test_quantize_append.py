"""quantize_append: equal to mx.quantize bit for bit, in its slots, in place where it may be."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import reference_turbo
from back_ends import NATIVE
from mlx_h2o import fast, use_backend
from mlx_h2o.config import KV_FORMATS
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.composed import buffers
from mlx_h2o.operations.composed.buffers import padded

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def bits_of(array: mx.array) -> np.ndarray:
    """A copy of an array's bits."""
    kind = mx.uint32 if array.dtype.size == 4 else mx.uint16
    return np.array(array.view(kind))


def address(array: mx.array) -> int:
    return np.array(array, copy=False).ctypes.data


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
    found = fast.quantize_append(
        tuple(packed[0]),
        tuple(packed[1]),
        *new,
        mx.array(slots),
        bits=bits,
        v_bits=v_bits,
        group_size=group_size,
        **given,
    )
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


@pytest.mark.parametrize(("bits", "v_bits"), [(8, 4), (4, 8), (6, 2)])
def test_keys_and_values_have_bits_of_their_own(backend, bits, v_bits):
    packed, new, slots = packed_and_new(9, bits=bits, v_bits=v_bits, length=1)
    check(packed, new, slots, bits=bits, v_bits=v_bits)


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


@NATIVE
def test_the_memory_of_inputs_that_nobody_holds_is_written_in_place():
    def address(array: mx.array) -> int:
        mx.eval(array)
        mx.synchronize()
        return int(np.array(array, copy=False).__array_interface__["data"][0])

    with use_backend("native"):
        packed, new, slots = packed_and_new(12)
        flat = [part + 0 for parts in packed for part in parts]
        del packed
        before = [address(part) for part in flat]
        for _ in range(3):
            k, v = tuple(flat[:3]), tuple(flat[3:])
            del flat
            k, v = fast.quantize_append(k, v, *new, mx.array(slots))
            flat = [*k, *v]
            del k, v
            assert [address(part) for part in flat] == before


PARTS = {0: 1, 8: 3}


def stored_and_new(kv_format: str, dtype: mx.Dtype, sizes: tuple[int, int]):
    """Nine rows of keys and values as the format keeps them, two new ones of each, and slots."""
    rng = np.random.default_rng(len(kv_format))
    stored, new = [], []
    widths = KV_FORMATS[kv_format]
    for size, bits, seed in zip(sizes, widths, reference_turbo.SEEDS.values(), strict=True):
        rows = mx.array(rng.standard_normal((2, 3, 11, size)).astype(np.float32)).astype(dtype)
        parts = buffers.packed(rows[:, :, :9], PARTS.get(bits, 2), bits, 32, seed)
        stored.append(tuple(part[...] for part in parts))
        new.append(rows[:, :, 9:])
    slots = np.argsort(rng.random((2, 3, 9)), axis=2)[:, :, :2].astype(np.uint32)
    bits, v_bits = widths
    return stored, new, slots, {"bits": bits or 8, "v_bits": v_bits, "group_size": 32}


def check_codes(kv_format: str, dtype: mx.Dtype, sizes: tuple[int, int]) -> None:
    """The format's rows in the slots, and no other row changed."""
    stored, new, slots, packing = stored_and_new(kv_format, dtype, sizes)
    before = [[bits_of(part) for part in parts] for parts in stored]
    found = fast.quantize_append(*stored, *new, mx.array(slots), **packing)
    index = mx.array(slots.astype(np.int32))
    for place, side in enumerate(("keys", "values")):
        bits, parts = KV_FORMATS[kv_format][place], found[place]
        assert [part.dtype for part in parts] == [part.dtype for part in stored[place]]
        written = [buffers.gathered(part, index) for part in parts]
        if bits == 0:
            assert mx.array_equal(written[0], new[place])
        elif bits == 8:
            expected = mx.quantize(new[place], group_size=32, bits=8)
            assert all(map(mx.array_equal, written, expected))
        else:
            reference_turbo.check_packed(*written, new[place], bits=bits, side=side)
        for part, old in zip(parts, before[place], strict=True):
            wanted = bits_of(part)
            at = slots.astype(np.int64)[..., None]
            np.put_along_axis(wanted, at, np.take_along_axis(old, at, axis=2), axis=2)
            np.testing.assert_array_equal(wanted, old)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_codes_are_those_of_the_format(backend, kv_format):
    index = list(KV_FORMATS).index(kv_format)
    check_codes(kv_format, DTYPES[index % 3], ((128, 64), (32, 256), (64, 1024))[index % 3])


@NATIVE
def test_codes_are_written_in_place():
    stored, new, slots, packing = stored_and_new("turbo3", mx.float32, (64, 128))
    flat = [part + 0 for parts in stored for part in parts]
    mx.eval(flat)
    before = [address(part) for part in flat]
    with use_backend("native"):
        for _ in range(3):
            k, v = tuple(flat[:2]), tuple(flat[2:])
            del flat
            k, v = fast.quantize_append(k, v, *new, mx.array(slots), **packing)
            flat = [*k, *v]
            del k, v
            mx.eval(flat)
    assert before == [address(part) for part in flat]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bits": 6}, "keys have 64 elements per row and codes of 6 bits, expected a power"),
        (
            {"new_keys": mx.zeros((2, 3, 2, 48))},
            "keys have 48 elements per row and codes of 3 bits, expected a power of two of "
            "elements from 32 to 1024, and 2, 3 or 4 bits.",
        ),
        (
            {"v_bits": 2},
            "value words are uint32 (2, 3, 9, 12), expected uint32 [B, H, N, Dv * v_bits / 32] = "
            "(2, 3, 9, 8).",
        ),
        (
            {"norms": mx.zeros((2, 3, 9, 1), mx.float16)},
            "key norms are float16 (2, 3, 9, 1), expected float32 [B, H, N, 1] = (2, 3, 9, 1).",
        ),
        ({"norms": mx.zeros((2, 3, 9, 2))}, "key norms are float32 (2, 3, 9, 2), expected"),
    ],
)
def test_codes_that_do_not_fit_are_refused(change, text):
    stored, new, slots, packing = stored_and_new("turbo3", mx.float32, (64, 128))
    norms, new_keys = change.get("norms", stored[0][1]), change.get("new_keys", new[0])
    numbers = packing | {name: value for name, value in change.items() if name in packing}
    with pytest.raises(ValueError) as caught:
        fast.quantize_append(
            (stored[0][0], norms), stored[1], new_keys, new[1], mx.array(slots), **numbers
        )
    assert str(caught.value).startswith("[quantize_append] " + text)


BAD = {
    "bits is 7, expected one of": {"bits": 7},
    "v_bits is 1, expected one of": {"v_bits": 1},
    "group_size is 48, expected one of": {"group_size": 48},
    "values have 48 elements per row of 8 bits, expected a multiple of group_size = 64 elements.": {
        "new_values": mx.zeros((2, 3, 3, 48))
    },
    "key words are uint32 (2, 3, 10, 32), expected uint32 [B, H, N, D * bits / 32] = (2, 3, N, "
    "16), every size at least 1.": {"bits": 4},
    "new keys are float32 (3, 3, 128), expected": {"new_keys": mx.zeros((3, 3, 128))},
    "new values are float32 (2, 3, 3, 64), expected float32, float16 or bfloat16 [B, H, L, Dv] = "
    "(2, 3, 1, Dv), every size at least 1.": {"new_keys": mx.zeros((2, 3, 1, 128))},
    "key scales are float32 (2, 3, 10, 2), expected float16 [B, H, N, D / group_size] = (2, 3, 10, "
    "2).": {"new_keys": mx.zeros((2, 3, 3, 128), mx.float16)},
    "slots are uint32 (2, 3, 1), expected uint32 [B, H, L] = (2, 3, 3).": {
        "slots": mx.zeros((2, 3, 1), mx.uint32)
    },
    "slots are int32 (2, 3, 3), expected uint32": {"slots": mx.zeros((2, 3, 3), mx.int32)},
}


@pytest.mark.parametrize("text", BAD)
def test_errors_say_what_was_found_and_expected(text):
    packed, new, slots = packed_and_new(13)
    given = {"new_keys": new[0], "new_values": new[1], "slots": mx.array(slots), **BAD[text]}
    arrays = [given.pop(name) for name in ("new_keys", "new_values", "slots")]
    with pytest.raises(ValueError) as caught:
        fast.quantize_append(*map(tuple, packed), *arrays, **given)
    assert str(caught.value).startswith("[quantize_append] " + text)


def test_rows_of_unequal_number_and_other_types_are_refused():
    packed, new, slots = packed_and_new(14)
    k, v = map(tuple, packed)
    fewer = tuple(part[:, :, :5] for part in v)
    with pytest.raises(
        ValueError, match=r"value words are uint32 \(2, 3, 5, 16\), .* = \(2, 3, 10, 16\)"
    ):
        fast.quantize_append(k, fewer, *new, mx.array(slots))
    with pytest.raises(TypeError, match="must be a tuple of words, scales and biases"):
        fast.quantize_append(k[0], v, *new, mx.array(slots))
    with pytest.raises(TypeError, match="bits must be an integer, found float"):
        fast.quantize_append(k, v, *new, mx.array(slots), bits=8.0)


@NATIVE
def test_the_native_module_refuses_on_its_own():
    from mlx_h2o import _core

    packed, new, slots = packed_and_new(15)
    k, v, s = list(packed[0]), list(packed[1]), mx.array(slots)
    numbers = {"bits": 8, "group_size": 64, "v_bits": 8}
    mx.eval(_core.quantize_append(k, v, *new, s, **numbers))
    for name, bad in (("bits", 4), ("bits", 9), ("v_bits", 0), ("group_size", 33)):
        with pytest.raises(ValueError, match=r"^\[quantize_append\] .* expected "):
            _core.quantize_append(k, v, *new, s, **{**numbers, name: bad})
    for arguments in ((k[:2], v, *new, s), (k, v, *new, s[:, :, :1]), (v, k, *new, s)):
        with pytest.raises(ValueError, match=r"^\[quantize_append\] .* expected "):
            _core.quantize_append(*arguments, **numbers)


@pytest.mark.parametrize("capacities", [(10, 10), (10, 14)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "v_bits"), [(8, 8), (3, 6), (4, 2)])
def test_rows_from_a_slot_on(backend, bits, v_bits, dtype, capacities):
    """The operation of a cache's step, against its definition, and what is handed out with it."""
    packed, new, _ = packed_and_new(30, bits=bits, v_bits=v_bits, dtype=dtype)
    packed = [
        [padded(part, capacity, 0) for part in parts]
        for parts, capacity in zip(packed, capacities, strict=True)
    ]
    for start in (0, 4, 7):
        copies = [[part[...] for part in parts] for parts in packed]
        expected = buffers.append_quantized(*copies, *new, start, bits, 64, v_bits)
        found = resolve().append_quantized(*packed, *new, start, bits, 64, v_bits)
        assert len(found) == len(expected) == 12
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            np.testing.assert_array_equal(bits_of(one), bits_of(other))
        packed = [found[:3], found[3:6]]


@NATIVE
def test_rows_from_a_slot_on_are_written_in_place():
    packed, new, _ = packed_and_new(31, length=1)
    parts = [part for parts in packed for part in parts]
    del packed
    mx.eval(parts)
    where = [address(part) for part in parts]
    with use_backend("native"):
        for start in range(4):
            found = resolve().append_quantized(parts[:3], parts[3:], *new, start, 8, 64, 8)
            parts, views = found[:6], found[6:]
            del found
            mx.eval(parts, views)
            del views
    assert where == [address(part) for part in parts]


@NATIVE
@pytest.mark.parametrize("start", [-1, 8, 2**31 - 1])
def test_rows_that_do_not_fit_are_refused(start):
    packed, new, _ = packed_and_new(32)
    with use_backend("native"), pytest.raises(ValueError, match=f"3 rows from slot {start} on"):
        resolve().append_quantized(*packed, *new, start, 8, 64, 8)
