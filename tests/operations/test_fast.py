"""The operations of mlx_h2o.fast, by the dispatch and by each back end that runs here."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from golden.build import row_bias
from mlx_h2o import backends, fast, use_backend
from mlx_h2o.operations import requests
from mlx_h2o.operations.backends import get
from sizes import examples

AVAILABLE = [None, *(name for name, status in backends().items() if status.available)]
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@pytest.mark.parametrize("backend", AVAILABLE, ids=str)
def test_a_stream_may_be_named(backend: str | None) -> None:
    q = mx.random.normal((1, 2, 1, 32))
    scores = mx.random.normal((1, 2, 8))
    positions = mx.broadcast_to(mx.arange(8, dtype=mx.int32), (1, 2, 8))
    for stream in (mx.cpu, mx.Device(mx.cpu), mx.new_stream(mx.cpu)):
        with use_backend(backend):
            out, _ = fast.scaled_dot_product_attention_with_scores(
                q, q, q, scale=1.0, stream=stream
            )
            kept = fast.keep_indices(scores, positions, keep=3, stream=stream)
        mx.eval(out, kept)
        assert out.shape == (1, 2, 1, 32)
        assert kept.shape == (1, 2, 3)


def test_scale_may_be_a_numpy_number() -> None:
    q = mx.random.normal((1, 2, 1, 32))
    one, _ = fast.scaled_dot_product_attention_with_scores(q, q, q, scale=np.float32(2))
    two, _ = fast.scaled_dot_product_attention_with_scores(q, q, q, scale=2)
    assert mx.array_equal(one, two)


@pytest.mark.parametrize("far", [2**31, 2**40, 10**30])
def test_zones_beyond_every_position(far: int) -> None:
    positions = mx.broadcast_to(mx.arange(6, dtype=mx.int32), (1, 2, 6))
    scores = mx.broadcast_to(mx.arange(6, dtype=mx.float32), (1, 2, 6))
    kept = fast.keep_indices(scores, positions, keep=2, recent_start=far)
    assert kept.tolist() == [[[4, 5], [4, 5]]]
    kept = fast.keep_indices(scores, positions, keep=2, recent_start=-far)
    assert kept.tolist() == [[[0, 1], [0, 1]]]
    kept = fast.keep_indices(scores, positions, keep=2, sink_size=far)
    assert kept.tolist() == [[[0, 1], [0, 1]]]


# Properties


def selection(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, dict[str, int | None]]:
    batch, heads, rows = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 40))
    values = st.one_of(
        st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0]),
        st.floats(width=32),
    )
    count = batch * heads * rows
    scores = draw(st.lists(values, min_size=count, max_size=count))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    positions = np.array([rng.permutation(3 * rows)[:rows] for _ in range(batch * heads)])
    positions = np.where(
        rng.random(positions.shape) < draw(st.sampled_from([0, 0.2, 1])), -1, positions
    )
    zones = {
        "sink_size": draw(st.integers(0, 5)),
        "recent_start": draw(st.one_of(st.none(), st.integers(-3, 3 * rows))),
    }
    shape = (batch, heads, rows)
    return (
        np.array(scores, np.float32).reshape(shape),
        positions.astype(np.int32).reshape(shape),
        zones,
    )


@pytest.mark.examples
@pytest.mark.parametrize("backend", AVAILABLE, ids=str)
@settings(max_examples=examples(100), deadline=None)
@given(drawn=st.composite(selection)(), data=st.data())
def test_selection_property(
    backend: str | None, drawn: tuple[np.ndarray, np.ndarray, dict[str, int]], data: st.DataObject
) -> None:
    scores, positions, zones = drawn
    rows = scores.shape[-1]
    keep = data.draw(st.integers(1, rows))
    # Views with slack that would win if it were looked at.
    padding = [(0, 0), (0, 0), (1, 2)]
    s = mx.pad(mx.array(scores), padding, constant_values=math.inf)[..., 1:-2]
    p = mx.pad(mx.array(positions), padding)[..., 1:-2]
    with use_backend(backend):
        kept = np.array(fast.keep_indices(s, p, keep=keep, **zones))
    assert np.array_equal(kept, reference.keep_indices(scores, positions, keep=keep, **zones))


@pytest.mark.examples
@pytest.mark.parametrize("backend", AVAILABLE, ids=str)
@settings(max_examples=examples(60), deadline=None)
@given(
    heads=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    counts=st.tuples(st.integers(1, 10), st.integers(1, 70)),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["none", "causal", "bool", "additive"]),
    sinks=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_attention_property(backend, heads, sizes, counts, dtype, kind, sinks, bias, seed) -> None:
    rng = np.random.default_rng(seed)
    kv_heads, group = heads
    queries, rows = counts

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

    hq = kv_heads * group
    q, k, v = (
        normal(1, n, r, size)
        for n, r, size in (
            (hq, queries, sizes[0]),
            (kv_heads, rows, sizes[0]),
            (kv_heads, rows, sizes[1]),
        )
    )
    masks = {
        "none": None,
        "causal": "causal",
        "bool": mx.array(rng.random((hq, queries, rows)) < 0.5),
        "additive": mx.where(mx.array(rng.random((queries, rows)) < 0.5), -np.inf, normal(1)),
    }
    given_ = {
        "scale": sizes[0] ** -0.5,
        "mask": masks[kind],
        "sinks": normal(hq) if sinks else None,
        "row_bias": row_bias(rng, (1, kv_heads, rows), nan=seed % 2 == 1) if bias else None,
    }
    request = requests.attention_request(q, k, v, **given_)
    with use_backend(backend):
        if backend is not None and get(backend).refuses(request):
            return
        found = fast.scaled_dot_product_attention_with_scores(q, k, v, **given_, return_lse=True)
    expected = reference.attention(q, k, v, **given_)
    allowed = reference.tolerances(q, k, v, **given_, expected=expected)
    for key, a, b, c in zip(("out", "scores", "lse"), found, expected, allowed, strict=True):
        assert reference.worst_error(a, b) <= c, key
