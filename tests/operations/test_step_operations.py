"""The operations of a decode step: packed rows, and the next row to go."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import reference
from mlx_h2o import fast

PACKINGS = [(8, 8, 64), (4, 4, 32), (8, 4, 32), (3, 6, 64)]


def packed(dense: mx.array, bits: int, group_size: int):
    return tuple(mx.quantize(dense, bits=bits, group_size=group_size))


class Rows:
    """A store's arrays, B = 2, H = 3."""

    def __init__(self, seed, rows=37, dtype=mx.float16, width=64):
        rng = np.random.default_rng(seed)
        normal = rng.standard_normal
        self.keys = mx.array(normal((2, 3, rows, width)).astype(np.float32)).astype(dtype)
        self.values = mx.array(normal((2, 3, rows, 2 * width)).astype(np.float32)).astype(dtype)
        importance = rng.random((2, 3, rows)).astype(np.float32)
        importance[rng.random(importance.shape) < 0.1] = np.nan
        positions = np.stack([rng.permutation(rows) for _ in range(6)]).reshape(2, 3, rows)
        self.importance, self.positions = mx.array(importance), mx.array(positions, mx.int32)

    def stored(self, packing=None):
        if packing is None:
            return self.keys, self.values
        bits, v_bits, group_size = packing
        return packed(self.keys, bits, group_size), packed(self.values, v_bits, group_size)


def settings(packing):
    return {} if packing is None else dict(zip(("bits", "v_bits", "group_size"), packing))  # noqa: B905


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
    zones = zones | {"keep": rows - 1}
    found = fast.keep_indices(mx.array(importance), mx.array(positions), **zones)
    slots = reference.keep_indices(importance, positions, **zones)
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


def test_rows_of_two_kinds_are_refused():
    rows = Rows(12)
    _, values = rows.stored((8, 8, 64))
    q = mx.ones((2, 6, 1, 64), mx.float16)
    with pytest.raises(TypeError, match=r"^\[attention_and_accumulate\] keys and values are arr"):
        fast.attention_and_accumulate(q, rows.keys, values, rows.importance, scale=1.0, decay=0.9)
