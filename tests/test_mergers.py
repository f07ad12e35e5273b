"""The operation that merges rows: the definition, and the native one beside it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import use_backend
from mlx_h2o.operations import merging, native
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.segments import biased_attention

needs_native = pytest.mark.skipif(
    native.unavailable_reason() != "", reason="needs the native back end"
)


def rows(seed: int, dtype: mx.Dtype, count: int = 90, size: int = 64, value_size: int = 32):
    """Keys, values, ln n and positions of rows in wider buffers, as a cache has them."""
    rng = np.random.default_rng(seed)
    shape = (2, 3, count)
    keys = mx.array(rng.standard_normal((*shape[:2], count + 5, size)).astype(np.float32))
    values = mx.array(rng.standard_normal((*shape[:2], count + 3, value_size)).astype(np.float32))
    bias = mx.log(mx.array(rng.integers(1, 6, (2, 3, count + 4)).astype(np.float32)))
    places = np.stack([rng.permutation(count) for _ in range(6)]).reshape(shape)
    keys, values = (part.astype(dtype)[:, :, :count] for part in (keys, values))
    return keys, values, bias[:, :, :count], mx.array(places.astype(np.int32))


def found(backend: str, *given, **options) -> list[np.ndarray]:
    with use_backend(backend):
        made = resolve().function(merging.mergers)(*given, **options)
    return [np.array(part.astype(mx.float32)) for part in made]


@needs_native
@pytest.mark.parametrize("going", [1, 2, 9, 20])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("recent", [70, mx.array([60, 75], mx.int32)])
def test_the_native_operation_does_what_the_definition_says(going, dtype, recent):
    given = rows(going, dtype)
    options = {"keep": 90 - going, "sink_size": 4, "recent_start": recent}
    expected, ours = found("composed", *given, **options), found("native", *given, **options)
    for place in (0, 1, 5):  # slots and positions
        np.testing.assert_array_equal(ours[place], expected[place])
    step = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
    for place in (2, 3, 4):
        np.testing.assert_allclose(ours[place], expected[place], atol=step, rtol=step)


@pytest.mark.parametrize("backend", ["composed", pytest.param("native", marks=needs_native)])
def test_heads_that_share_merge_the_same_slots(backend):
    keys, values, bias, places = rows(3, mx.float32)
    places = mx.broadcast_to(places[:, :1], places.shape)
    made = found(
        backend, keys, values, bias, places, keep=80, sink_size=4, recent_start=70, shared=True
    )
    for slots in made[:2]:
        np.testing.assert_array_equal(slots, np.broadcast_to(slots[:, :1], slots.shape))


@pytest.mark.parametrize("backend", ["composed", pytest.param("native", marks=needs_native)])
def test_rows_without_a_partner_go_as_they_are(backend):
    """Two rows are free, and both go: the later one has nowhere to."""
    keys, values, bias, _ = rows(4, mx.float32, count=12)
    places = mx.broadcast_to(mx.arange(12, dtype=mx.int32), (2, 3, 12))
    kept, into, _, _, ln, _ = found(
        backend, keys, values, bias, places, keep=10, sink_size=5, recent_start=7
    )
    np.testing.assert_array_equal(kept[0, 0], [0, 1, 2, 3, 4, 7, 8, 9, 10, 11])
    np.testing.assert_array_equal(into[0, 0], [6, 6])
    together = np.log(np.exp(np.array(bias)[:, :, 5:7]).sum(-1))
    np.testing.assert_allclose(ln, np.stack([together, together], axis=-1), rtol=1e-6)


@pytest.mark.parametrize("backend", ["composed", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("shared", [False, True])
def test_rows_without_a_bias_go_first_and_none_goes_there(backend, shared):
    """Those that no range protects; the others merge as if they were not there."""
    keys, values, bias, _ = rows(7, mx.float32, count=12)
    places = mx.broadcast_to(mx.arange(12, dtype=mx.int32), (2, 3, 12))
    leave = mx.array([slot in (0, 4, 6, 11) for slot in range(12)])
    given = keys, values, mx.where(leave, mx.nan, bias), places
    options = {"sink_size": 2, "recent_start": 10, "shared": shared}
    kept, *_ = found(backend, *given, keep=11, **options)
    np.testing.assert_array_equal(kept[0, 0], [n for n in range(12) if n != 6])
    kept, into, new_keys, *_ = found(backend, *given, keep=10, **options)
    np.testing.assert_array_equal(kept[0, 0], [n for n in range(12) if n not in (4, 6)])
    np.testing.assert_array_equal(into[0, 0], [4, 6])
    np.testing.assert_allclose(new_keys, np.array(keys)[:, :, [4, 6]], rtol=1e-6)
    kept, into, _, _, ln, _ = found(backend, *given, keep=9, **options)
    assert not {4, 6} & {*kept.ravel()}
    assert {0, 11} <= {*kept[1, 2]}
    (merged,) = {*into[0, 0]} - {4, 6}
    assert merged not in (0, 1, 10, 11)
    assert np.isfinite(ln).all()


@needs_native
def test_the_native_operation_refuses_what_it_cannot_read():
    keys, values, bias, places = rows(5, mx.float32)
    call = native._module().mergers
    options = {"keep": 80, "sink_size": 4, "recent_start": 70}
    wrong = (
        ((keys, values[:, :2], bias, places), {}, "keys are float32"),
        ((keys, values.astype(mx.float16), bias, places), {}, "keys are float32"),
        ((keys, values, bias[:, :, :-1], places), {}, "bias are float32"),
        ((keys, values, bias, places.astype(mx.uint32)), {}, "positions are uint32"),
        ((keys, values, bias, places), {"keep": 90}, "keep is 90, expected 1 to N - 1 = 89"),
        ((keys, values, bias, places), {"keep": 0}, "keep is 0"),
    )
    for given, changed, said in wrong:
        with pytest.raises(ValueError, match=said):
            call(*given, **options | changed)


@pytest.mark.parametrize("backend", ["composed", pytest.param("native", marks=needs_native)])
def test_a_head_that_attention_spreads_has_one_bias(backend):
    """Latent attention stores one head, and gives a chunk as many as there are queries."""
    keys, values, bias, _ = rows(6, mx.float32, value_size=64)
    queries = mx.random.normal((2, 6, 5, 64), key=mx.random.key(1))
    one = [part[:, :1] for part in (keys, values, bias)]
    spread = [mx.repeat(part, 6, axis=1) for part in one]
    with use_backend(backend):
        ours = biased_attention(queries, *spread[:2], one[2], scale=0.125, mask="causal")
        alone = biased_attention(queries, *one, scale=0.125, mask="causal")
    np.testing.assert_allclose(np.array(ours), np.array(alone), atol=1e-5)
