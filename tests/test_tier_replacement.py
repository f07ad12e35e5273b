"""A new row in a cache of mixed precision: the native operation against its definition."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import fast, use_backend
from mlx_h2o.operations import native
from mlx_h2o.operations.tier_requests import TierRequest, TierRows
from mlx_h2o.stores.packing import Packing
from mlx_h2o.stores.tier_replacement import composed_replacement, serve_tier_replacement

NATIVE = pytest.mark.skipif(bool(native.unavailable_reason()), reason="no native back end")
WIDTHS = {"8 and 4": [(8, 8), (4, 4)], "4 and 2": [(4, 4), (2, 2)], "8 and 2": [(8, 8), (2, 2)],
          "K8 V4": [(8, 4)], "3 and 6": [(3, 6)]}  # fmt: skip
HEAVY, LIGHT, NEWEST, GROUP = 5, 4, 3, 32


def request_of(rng, kind, dtype, *, statistics=False, ranks=False, batch=2, values=96):
    """Rows at scattered positions, the newest in order; ties and NaN among their scores."""
    heads, width = 3, 64
    sizes = [HEAVY, LIGHT][: len(WIDTHS[kind])]
    slots = sum(sizes) + NEWEST

    def rows(count, size):
        return mx.array(rng.standard_normal((batch, heads, count, size)), mx.float32).astype(dtype)

    tiers, parts = [], []
    for count, (bits, v_bits) in zip(sizes, WIDTHS[kind], strict=True):
        packing = Packing(bits, v_bits, GROUP)
        packed = packing.packed(rows(count, width), rows(count, values))
        tiers.append(TierRows(*packed, bits, v_bits))
        parts.append(fast.key_statistics(packed[0], bits=bits, group_size=GROUP))
    newest = rows(NEWEST, width), rows(NEWEST, values)
    parts.append(fast.key_statistics(newest[0]))
    position = 50
    old = [rng.permutation(position - NEWEST)[: sum(sizes)] for _ in range(batch * heads)]
    positions = np.array([[*one, *range(position - NEWEST, position)] for one in old])
    scores = rng.integers(0, 6, (2, batch, heads, slots)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.15] = np.nan
    known = (
        sum((one[0] for one in parts), start=mx.zeros(1)),
        mx.concatenate([one[1] for one in parts], axis=2),
    )
    return TierRequest(
        tuple(tiers), *newest, mx.array(scores[0]),
        mx.array(positions.reshape(batch, heads, slots), mx.int32),
        rows(1, width), rows(1, values), position, 4, position - NEWEST - 1, GROUP,
        mx.array(scores[1]) if ranks else None, known if statistics else None,
    )  # fmt: skip


def arrays_of(request):
    tiers = [part for tier in request.tiers for part in (*tier.keys, *tier.values)]
    rest = [request.keys, request.values, request.importance, request.positions]
    return [np.array(one.astype(mx.float32) if one.dtype == mx.bfloat16 else one)
            for one in (*tiers, *rest)]  # fmt: skip


@NATIVE
@pytest.mark.parametrize("kind", sorted(WIDTHS))
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("ranks", [False, True])
def test_native_rows_are_those_of_the_definition_bit_for_bit(kind, dtype, ranks):
    rng = np.random.default_rng(3)
    moved = set()
    for _ in range(8):
        request = request_of(rng, kind, dtype, ranks=ranks)
        before = arrays_of(request)
        expected = arrays_of(composed_replacement(request))
        found = arrays_of(native.replace_in_tiers(request))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(before, arrays_of(request), strict=True):
            np.testing.assert_array_equal(one, other)  # what is held elsewhere does not change
        if len(request.tiers) > 1:
            changed = found[-1] != before[-1]
            heavy, light = changed[:, :, :HEAVY], changed[:, :, HEAVY : HEAVY + LIGHT]
            moved |= set(zip(heavy.sum(axis=2).flat, light.sum(axis=2).flat, strict=True))
    if len(WIDTHS[kind]) > 1:
        assert moved == {(1, 0), (0, 1), (1, 1)}  # heavy row gone; light row gone; and one sunk


@NATIVE
@pytest.mark.parametrize("kind", sorted(WIDTHS))
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_native_statistics_are_those_of_the_keys_as_stored(kind, dtype):
    rng = np.random.default_rng(5)
    request = request_of(rng, kind, dtype, statistics=True)
    for _ in range(6):
        request = native.replace_in_tiers(request)
        parts = [
            fast.key_statistics(tier.keys, bits=tier.bits, group_size=GROUP)
            for tier in request.tiers
        ]
        parts.append(fast.key_statistics(request.keys))
        key_sum, inverse_norms = request.statistics
        np.testing.assert_allclose(
            np.array(key_sum), np.array(sum(one[0] for one in parts)), rtol=0, atol=2e-5
        )
        expected = np.concatenate([np.array(one[1]) for one in parts], axis=2)
        np.testing.assert_allclose(np.array(inverse_norms), expected, rtol=1e-5)
        more = [mx.array(rng.standard_normal(rows.shape), mx.float32).astype(dtype)
                for rows in (request.new_keys, request.new_values)]  # fmt: skip
        request = request._replace(
            new_keys=more[0], new_values=more[1], position=request.position + 1,
            recent_start=request.recent_start + 1,
        )  # fmt: skip


@NATIVE
def test_strided_new_rows_and_ranks():
    """Queries, keys and values are usually views of one product."""
    request = request_of(np.random.default_rng(8), "8 and 4", mx.float32, ranks=True)
    wide = [mx.concatenate([rows, rows], axis=2).swapaxes(1, 2)
            for rows in (request.new_keys, request.new_values)]  # fmt: skip
    mx.eval(wide)
    views = [rows.swapaxes(1, 2)[:, :, :1] for rows in wide]
    ranks = mx.contiguous(request.ranks.swapaxes(1, 2)).swapaxes(1, 2)
    viewed = request._replace(new_keys=views[0], new_values=views[1], ranks=ranks)
    for one, other in zip(
        arrays_of(native.replace_in_tiers(viewed)),
        arrays_of(native.replace_in_tiers(request)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@NATIVE
def test_rows_that_nobody_holds_are_written_in_place():
    from mlx_h2o import _core

    request = request_of(np.random.default_rng(2), "8 and 4", mx.float32, statistics=True)
    request = native.replace_in_tiers(request)

    def addresses():
        tiers = [part for tier in request.tiers for part in (*tier.keys, *tier.values)]
        rest = [request.keys, request.values, request.importance, request.positions]
        every = [*tiers, *rest, *request.statistics]
        mx.eval(every)
        return [_core.buffer_address(one) for one in every]

    before = addresses()
    request = native.replace_in_tiers(request)
    assert addresses() == before


def test_the_back_end_that_is_named_serves():
    request = request_of(np.random.default_rng(1), "8 and 4", mx.float32, statistics=True)
    with use_backend("composed"):
        found = serve_tier_replacement(request)
    assert found.statistics is request.statistics  # the definition leaves them
    if not native.unavailable_reason():
        with use_backend("native"):
            assert serve_tier_replacement(request).statistics is not request.statistics


@NATIVE
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: {"keys": r.keys[:, :, :0]}, "keys are empty"),
        (lambda r: {"new_keys": r.new_keys[:1]}, r"new keys are float32 \(1, 3, 1, 64\)"),
        (lambda r: {"importance": r.importance[:, :, 1:]}, "importance values are"),
        (lambda r: {"positions": r.importance}, "positions are float32"),
        (lambda r: {"tiers": r.tiers[::-1]}, "expected fewer in the second tier"),
        (lambda r: {"group_size": 16}, "group_size is 16"),
        (lambda r: {"tiers": r.tiers[:1]}, "importance values are"),
        (lambda r: {"ranks": r.positions}, "ranks are int32"),
        (lambda r: {"statistics": (r.importance, r.importance)}, "key_sum values are"),
        (lambda r: {"position": -1}, "position is -1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, text):
    request = request_of(np.random.default_rng(1), "8 and 4", mx.float32)
    with pytest.raises(ValueError, match=rf"^\[replace_in_tiers\] .*{text}"):
        native.replace_in_tiers(request._replace(**change(request)))
