"""The operations of mlx_h2o.fast, by dispatch and on each back end that runs here."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import backends, fast, use_backend

AVAILABLE = [None, *(name for name, status in backends().items() if status.available)]


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


@pytest.mark.parametrize("return_skipped", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_results_are_what_was_asked_for(return_lse: bool, return_skipped: bool) -> None:
    rows = mx.quantize(mx.ones((1, 2, 10, 64)), bits=8)
    found = fast.scaled_dot_product_attention_quantized_with_scores(
        mx.ones((1, 4, 1, 64)), *rows, *rows, scale=0.1,
        return_lse=return_lse, return_skipped=return_skipped,
    )  # fmt: skip
    small = [(1, 4, 1)] * (return_lse + return_skipped)
    assert [array.shape for array in found] == [(1, 4, 1, 64), (1, 4, 1, 10), *small]
    if return_lse and return_skipped:
        assert mx.all(found[2] > 0) and mx.all(found[3] == 0)
