"""The operations of a decode step: packed rows, known slots, key statistics, the next row to go."""

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
@pytest.mark.parametrize("known", [False, True])
def test_rows_of_every_kind_are_replaced(backend, packing, dtype, known):
    rows = Rows(0, dtype=dtype)
    zones = {"sink_size": 3, "recent_start": 30}
    slots = reference.evict_indices(np.array(rows.importance), np.array(rows.positions), **zones)
    slots = slots[..., 0]
    how = {"worst": mx.array(slots, mx.uint32)} if known else {}
    given = rows.arguments(packing)
    before = [np.array(part.view(mx.uint8)) for part in (*parts(given[0]), *parts(given[1]))]
    keys, values, importance, positions = fast.replace_worst(
        *given, position=50, **zones, **how, **settings(packing)
    )
    new = (rows.new_keys, rows.new_values)
    if packing is not None:
        new = (packed(new[0], packing[0], packing[2]), packed(new[1], packing[1], packing[2]))
    for found, stored, row in zip((keys, values), given[:2], new, strict=True):
        for part in zip(parts(found), parts(stored), parts(row), strict=True):
            same(part[0], with_new(part[1], part[2], slots))
    nan = mx.full((2, 3, 1), mx.nan)
    place = mx.full((2, 3, 1), 50, mx.int32)
    same(importance[..., None], with_new(rows.importance[..., None], nan[..., None], slots))
    same(positions[..., None], with_new(rows.positions[..., None], place[..., None], slots))
    after = [np.array(part.view(mx.uint8)) for part in (*parts(given[0]), *parts(given[1]))]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_slot_beyond_the_end_is_the_last(backend):
    rows = Rows(1)
    worst = mx.full((2, 3), 2**32 - 1, mx.uint32)
    keys, *_ = fast.replace_worst(*rows.arguments(), position=50, worst=worst)
    same(keys, with_new(rows.keys, rows.new_keys, np.full((2, 3), 36)))


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


@pytest.mark.parametrize("packing", [None, *PACKINGS], ids=str)
def test_key_statistics_are_those_of_the_directions(backend, packing):
    rows = Rows(3, dtype=mx.float32)
    keys = rows.stored(packing)[0]
    bits = {} if packing is None else {"bits": packing[0], "group_size": packing[2]}
    key_sum, inverse_norms = fast.key_statistics(keys, **bits)
    dense = np.array(rows.keys if packing is None else mx.dequantize(*keys, **bits), np.float64)
    norms = np.linalg.norm(dense, axis=-1)
    np.testing.assert_allclose(np.array(inverse_norms), 1 / norms, rtol=1e-5)
    expected = (dense / norms[..., None]).sum(axis=2)
    np.testing.assert_allclose(np.array(key_sum), expected, rtol=1e-4, atol=1e-5)


def test_a_key_of_zeros_has_no_direction(backend):
    key_sum, inverse_norms = fast.key_statistics(mx.zeros((1, 1, 3, 8)))
    assert np.array(key_sum).tolist() == [[[0] * 8]]
    np.testing.assert_allclose(np.array(inverse_norms), 1e12)


@pytest.mark.parametrize("packing", [None, (8, 8, 32), (4, 8, 64)], ids=str)
@pytest.mark.parametrize("known", [False, True])
def test_statistics_stay_those_of_the_stored_keys(backend, packing, known):
    rows = Rows(4, dtype=mx.float32)
    keys, values, importance, positions, *_ = rows.arguments(packing)
    bits = {} if packing is None else {"bits": packing[0], "group_size": packing[2]}
    statistics = fast.key_statistics(keys, **bits)
    rng = np.random.default_rng(5)
    for step in range(20):
        new = mx.array(rng.standard_normal((2, 3, 1, 64)).astype(np.float32))
        how = {"worst": mx.array(rng.integers(0, 37, (2, 3)), mx.uint32)} if known else {}
        keys, values, importance, positions, *statistics = fast.replace_worst(
            keys, values, importance, positions, new, mx.concatenate([new, new], 3),
            position=37 + step, statistics=tuple(statistics), **how, **settings(packing),
        )  # fmt: skip
        expected = fast.key_statistics(keys, **bits)
        np.testing.assert_allclose(statistics[0], expected[0], rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(statistics[1], expected[1], rtol=1e-5)


@pytest.mark.parametrize("packing", [None, (8, 8, 64), (8, 4, 32)], ids=str)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("mask", [None, "causal", "bool"])
@pytest.mark.parametrize("rows", [1, 37, 65, 700, 1100])
def test_attention_names_the_row_that_goes_next(backend, packing, queries, mask, rows):
    given = Rows(6, rows=rows)
    keys, values = given.stored(packing)
    rng = np.random.default_rng(7)
    q = mx.array(rng.standard_normal((2, 12, queries, 64)).astype(np.float32)).astype(mx.float16)
    if mask == "bool":
        mask = mx.array(rng.random((2, 1, queries, rows)) < 0.7)
    zones = {"sink_size": 4, "recent_start": max(rows - 9, 5)}
    options = {"scale": 0.125, "decay": 0.9, "mask": mask, **settings(packing)}
    expected = fast.attention_and_accumulate(q, keys, values, given.importance, **options)
    out, importance, worst = fast.attention_and_accumulate(
        q, keys, values, given.importance, positions=given.positions, **zones, **options
    )
    same(out, expected[0])
    same(importance, expected[1])
    slots = reference.evict_indices(np.array(importance), np.array(given.positions), **zones)
    np.testing.assert_array_equal(np.array(worst), slots[..., 0])
    assert worst.dtype == mx.uint32


SPECIAL = {
    "padding goes first, the later slot of it": lambda c, p: p.__setitem__((..., slice(5, 8)), -1),
    "all padding": lambda c, p: p.fill(-1),
    "unscored rows": lambda c, p: c.__setitem__((..., slice(0, 30)), np.nan),
    "equal scores": lambda c, p: c.fill(1.0),
    "infinite and negative": lambda c, p: c.__setitem__(
        (0, slice(None), slice(0, 4)), [[np.inf, -np.inf, -1.0, -0.0]] * 3
    ),
}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("zones", [{}, {"sink_size": 3}, {"recent_start": 0}, {"recent_start": 60}])
def test_the_next_row_in_special_cases(backend, special, zones):
    """Every pair is masked, so that the importance stays as it is."""
    given = Rows(8, rows=70)
    importance, positions = np.array(given.importance), np.array(given.positions)
    SPECIAL[special](importance, positions)
    q = mx.ones((2, 6, 1, 64), mx.float16)
    mask = mx.zeros((2, 1, 1, 70), mx.bool_)
    _, found, worst = fast.attention_and_accumulate(
        q, given.keys, given.values, mx.array(importance), positions=mx.array(positions),
        scale=1.0, decay=0.9, mask=mask, **zones,
    )  # fmt: skip
    np.testing.assert_array_equal(np.array(found), importance)
    slots = reference.evict_indices(importance, positions, **zones)
    np.testing.assert_array_equal(np.array(worst), slots[..., 0])


def test_positions_may_be_a_view(backend):
    given = Rows(9)
    wide = mx.repeat(given.positions, 2, axis=2)[:, :, ::2]
    q = mx.ones((2, 6, 1, 64), mx.float16)
    results = [
        fast.attention_and_accumulate(
            q, given.keys, given.values, given.importance, scale=0.1, decay=0.9, positions=places
        )
        for places in (given.positions, wide)
    ]
    same(results[0][2], results[1][2])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"positions": mx.zeros((2, 3, 36), mx.int32)}, "positions are int32 (2, 3, 36), expected"),
        ({"positions": mx.zeros((2, 3, 37))}, "positions are float32 (2, 3, 37), expected int32"),
        ({"sink_size": 1}, "sink_size and recent_start are 1 and None without positions"),
        ({"sparse_v_threshold": 0.1}, "sparse_v_threshold is 0.1, expected 0 with dense rows"),
    ],
    ids=str,
)
def test_what_attention_refuses(changes, text):
    rows = Rows(10)
    q = mx.ones((2, 6, 1, 64), mx.float16)
    with pytest.raises(ValueError) as caught:
        fast.attention_and_accumulate(
            q, rows.keys, rows.values, rows.importance, scale=1.0, decay=0.9, **changes
        )
    assert str(caught.value).startswith("[attention_and_accumulate] " + text)


STATISTICS = (mx.zeros((2, 3, 64)), mx.zeros((2, 3, 37)))


@pytest.mark.parametrize(
    ("packing", "changes", "error", "text"),
    [
        (None, {"worst": mx.zeros((2, 3), mx.int32)}, ValueError, "worst are int32 (2, 3), expect"),
        (None, {"worst": mx.zeros((2, 2), mx.uint32)}, ValueError, "worst are uint32 (2, 2), exp"),
        (
            None,
            {"worst": mx.zeros((2, 3), mx.uint32), "ranks": "age"},
            ValueError,
            "ranks and worst are both given",
        ),
        (None, {"statistics": STATISTICS[:1]}, TypeError, "statistics must be a tuple of key_sum"),
        (None, {"statistics": STATISTICS[::-1]}, ValueError, "key_sum are float32 (2, 3, 37), exp"),
        ((8, 8, 64), {"bits": 7}, ValueError, "bits is 7, expected one of"),
        ((8, 8, 64), {"group_size": 16}, ValueError, "group_size is 16, expected one of"),
        ((8, 8, 64), {"bits": 4}, ValueError, "scales of the keys are float16 (2, 3, 37, 1), exp"),
    ],
    ids=str,
)
def test_what_replacement_refuses(packing, changes, error, text):
    rows = Rows(11)
    with pytest.raises(error) as caught:
        fast.replace_worst(*rows.arguments(packing), position=5, **{**settings(packing), **changes})
    assert str(caught.value).startswith("[replace_worst] " + text)


def test_rows_of_two_kinds_are_refused():
    rows = Rows(12)
    _, values, *rest = rows.arguments((8, 8, 64))
    with pytest.raises(TypeError, match=r"^\[replace_worst\] keys and values are array and tuple"):
        fast.replace_worst(rows.keys, values, *rest, position=5)
    q = mx.ones((2, 6, 1, 64), mx.float16)
    with pytest.raises(TypeError, match=r"^\[attention_and_accumulate\] keys and values are arr"):
        fast.attention_and_accumulate(q, rows.keys, values, rest[0], scale=1.0, decay=0.9)
