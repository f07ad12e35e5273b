"""The operations of a decode step: packed rows, numbers per sequence, the next row to go."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import reference
from mlx_h2o import fast, use_backend
from mlx_h2o.operations import native

BACKENDS = ["composed"] if native.unavailable_reason() else ["composed", "native"]
PACKINGS = [(8, 8, 64), (4, 4, 32), (8, 4, 32), (3, 6, 64)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    with use_backend(request.param):
        yield request.param


def packed(dense: mx.array, bits: int, group_size: int):
    return tuple(mx.quantize(dense, bits=bits, group_size=group_size))


class Rows:
    """A store's arrays and a new row, B = 2, H = 3."""

    def __init__(self, seed, rows=37, dtype=mx.float16, width=64):
        rng = np.random.default_rng(seed)
        normal = rng.standard_normal
        self.keys = mx.array(normal((2, 3, rows, width)).astype(np.float32)).astype(dtype)
        self.values = mx.array(normal((2, 3, rows, 2 * width)).astype(np.float32)).astype(dtype)
        self.new_keys = mx.array(normal((2, 3, 1, width)).astype(np.float32)).astype(dtype)
        self.new_values = mx.array(normal((2, 3, 1, 2 * width)).astype(np.float32)).astype(dtype)
        importance = rng.random((2, 3, rows)).astype(np.float32)
        importance[rng.random(importance.shape) < 0.1] = np.nan
        positions = np.stack([rng.permutation(rows) for _ in range(6)]).reshape(2, 3, rows)
        self.importance, self.positions = mx.array(importance), mx.array(positions, mx.int32)

    def stored(self, packing=None):
        if packing is None:
            return self.keys, self.values
        bits, v_bits, group_size = packing
        return packed(self.keys, bits, group_size), packed(self.values, v_bits, group_size)

    def arguments(self, packing=None):
        rest = (self.importance, self.positions, self.new_keys, self.new_values)
        return (*self.stored(packing), *rest)


def settings(packing):
    return {} if packing is None else dict(zip(("bits", "v_bits", "group_size"), packing))  # noqa: B905


def same(found: mx.array, expected: mx.array) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    kind = {2: mx.uint16, 4: mx.uint32}[found.dtype.size]
    np.testing.assert_array_equal(np.array(found.view(kind)), np.array(expected.view(kind)))


def parts(rows):
    return rows if isinstance(rows, tuple) else (rows,)


def with_new(stored: mx.array, new: mx.array, slots: np.ndarray) -> mx.array:
    """``stored`` with the rows of ``new`` at ``slots`` [B, H], by plain loops on bits."""
    kind = {2: mx.uint16, 4: mx.uint32}[stored.dtype.size]
    result, rows = np.array(stored.view(kind)), np.array(new.view(kind))
    for b, h in np.ndindex(slots.shape):
        result[b, h, slots[b, h]] = rows[b, h, 0]
    return mx.array(result).view(stored.dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("packing", [None, *PACKINGS], ids=str)
@pytest.mark.parametrize("clocks", [(30, 50), ([30, 12], [50, 41])], ids=["one", "of each"])
def test_rows_of_every_kind_are_replaced(backend, packing, dtype, clocks):
    rows = Rows(0, dtype=dtype)
    start, position = (mx.array(n, mx.int32) if isinstance(n, list) else n for n in clocks)
    zones = {"sink_size": 3, "recent_start": start}
    slots = reference.evict_indices(np.array(rows.importance), np.array(rows.positions), **zones)
    slots = slots[..., 0]
    given = rows.arguments(packing)
    before = [np.array(part.view(mx.uint8)) for part in (*parts(given[0]), *parts(given[1]))]
    keys, values, importance, positions = fast.replace_worst(
        *given, position=position, **zones, **settings(packing)
    )
    new = (rows.new_keys, rows.new_values)
    if packing is not None:
        new = (packed(new[0], packing[0], packing[2]), packed(new[1], packing[1], packing[2]))
    for found, stored, row in zip((keys, values), given[:2], new, strict=True):
        for part in zip(parts(found), parts(stored), parts(row), strict=True):
            same(part[0], with_new(part[1], part[2], slots))
    nan = mx.full((2, 3, 1), mx.nan)
    place = mx.broadcast_to(mx.array(position, mx.int32).reshape(-1, 1, 1), (2, 3, 1))
    same(importance[..., None], with_new(rows.importance[..., None], nan[..., None], slots))
    same(positions[..., None], with_new(rows.positions[..., None], place[..., None], slots))
    after = [np.array(part.view(mx.uint8)) for part in (*parts(given[0]), *parts(given[1]))]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rank", ["importance", "age", "key_diversity"])
@pytest.mark.parametrize("packing", [None, (8, 4, 32)], ids=str)
def test_ranks_of_packed_rows(backend, packing, rank):
    rows = Rows(2)
    given = rows.arguments(packing)
    dense = rows.keys
    if packing is not None:
        dense = mx.dequantize(*given[0], bits=packing[0], group_size=packing[2])
    ranks = {
        "importance": rows.importance,
        "age": rows.positions.astype(mx.float32),
        "key_diversity": fast.key_diversity(dense),
    }[rank]
    expected = reference.evict_indices(np.array(ranks), np.array(rows.positions), sink_size=2)
    found = fast.replace_worst(*given, position=50, sink_size=2, ranks=rank, **settings(packing))
    np.testing.assert_array_equal(np.argmax(np.array(found[3]) == 50, axis=2), expected[..., 0])


@pytest.mark.parametrize("rank", ["importance", "age", "array"])
def test_each_sequence_goes_by_its_own_clock(backend, rank):
    """Two sequences together lose the rows, and gain those, that they would alone."""
    rows = Rows(3)
    array = mx.array(np.random.default_rng(4).standard_normal((2, 3, 37)).astype(np.float32))
    starts, places = [33, 5], [40, 37]
    ranks = array if rank == "array" else rank
    found = fast.replace_worst(
        *rows.arguments(), position=mx.array(places), recent_start=mx.array(starts), ranks=ranks
    )
    for b in range(2):
        one = slice(b, b + 1)
        alone = fast.replace_worst(
            *(argument[one] for argument in rows.arguments()), position=places[b],
            recent_start=starts[b], ranks=ranks if isinstance(ranks, str) else ranks[one],
        )  # fmt: skip
        for together, single in zip(found, alone, strict=True):
            same(together[one], single)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_values_of_little_weight_are_left_out_of_a_step_too(backend, packing):
    rows = Rows(5, rows=300, dtype=mx.float32)
    keys, values = rows.stored(packing)
    q = mx.array(np.random.default_rng(6).standard_normal((2, 6, 1, 64)).astype(np.float32))
    options = {"scale": 0.4, **settings(packing)}
    sparse = {"sparse_v_threshold": 0.02}
    operation = fast.scaled_dot_product_attention_quantized_with_scores
    expected, scores = operation(q, *keys, *values, **options, **sparse)
    plain, _ = operation(q, *keys, *values, **options)
    assert mx.abs(expected - plain).max() > 1e-3
    out, importance = fast.attention_and_accumulate(
        q, keys, values, rows.importance, decay=0.9, **options, **sparse
    )
    assert mx.allclose(out, expected, atol=1e-5)
    after = fast.accumulate_scores(rows.importance, scores, decay=0.9)
    assert mx.allclose(importance, after, atol=1e-5, equal_nan=True)


SPECIAL = {
    "padding goes first, the later slot of it": lambda c, p: p.__setitem__((..., slice(5, 8)), -1),
    "all padding": lambda c, p: p.fill(-1),
    "unscored rows": lambda c, p: c.__setitem__((..., slice(0, 30)), np.nan),
    "equal scores": lambda c, p: c.fill(1.0),
    "infinite and negative": lambda c, p: c.__setitem__(
        (0, slice(None), slice(0, 4)), [[np.inf, -np.inf, -1.0, -0.0]] * 3
    ),
}


@pytest.mark.matrix(40)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("rows", [70, 700, 1100])
@pytest.mark.parametrize("zones", [{}, {"sink_size": 3}, {"recent_start": 0}, {"recent_start": 60}])
def test_the_next_row_in_special_cases(backend, special, rows, zones):
    given = Rows(8, rows=rows)
    importance, positions = np.array(given.importance), np.array(given.positions)
    SPECIAL[special](importance, positions)
    found = fast.evict_indices(mx.array(importance), mx.array(positions), **zones)
    slots = reference.evict_indices(importance, positions, **zones)
    np.testing.assert_array_equal(np.array(found), slots)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"decay": 1.0}, "decay is 1.0, expected at least 0 and below 1"),
        ({"sparse_v_threshold": 0.1}, "sparse_v_threshold is 0.1, expected 0 with dense rows"),
    ],
    ids=str,
)
def test_what_attention_refuses(changes, text):
    rows = Rows(10)
    q = mx.ones((2, 6, 1, 64), mx.float16)
    with pytest.raises(ValueError) as caught:
        fast.attention_and_accumulate(
            q, rows.keys, rows.values, rows.importance, **{"scale": 1.0, "decay": 0.9, **changes}
        )
    assert str(caught.value).startswith("[attention_and_accumulate] " + text)


@pytest.mark.parametrize(
    ("packing", "changes", "error", "text"),
    [
        (
            None,
            {"position": mx.zeros((3,), mx.int32)},
            ValueError,
            "position is int32 (3,), expected an integer, or int32 () or [B] = (2,).",
        ),
        (
            None,
            {"recent_start": mx.zeros((2,))},
            ValueError,
            "recent_start is float32 (2,), expected an integer, or int32 () or [B] = (2,).",
        ),
        ((8, 8, 64), {"bits": 7}, ValueError, "bits is 7, expected one of"),
        ((8, 8, 64), {"group_size": 16}, ValueError, "group_size is 16, expected one of"),
        ((8, 8, 64), {"bits": 4}, ValueError, "scales of the keys are float16 (2, 3, 37, 1), exp"),
    ],
    ids=str,
)
def test_what_replacement_refuses(packing, changes, error, text):
    rows = Rows(11)
    with pytest.raises(error) as caught:
        given = {"position": 5, **settings(packing), **changes}
        fast.replace_worst(*rows.arguments(packing), **given)
    assert str(caught.value).startswith("[replace_worst] " + text)


def test_rows_of_two_kinds_are_refused():
    rows = Rows(12)
    _, values, *rest = rows.arguments((8, 8, 64))
    with pytest.raises(TypeError, match=r"^\[replace_worst\] keys and values are array and tuple"):
        fast.replace_worst(rows.keys, values, *rest, position=5)
    q = mx.ones((2, 6, 1, 64), mx.float16)
    with pytest.raises(TypeError, match=r"^\[attention_and_accumulate\] keys and values are arr"):
        fast.attention_and_accumulate(q, rows.keys, values, rest[0], scale=1.0, decay=0.9)
