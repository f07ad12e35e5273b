"""The kernels on a cache's rows, run by the emulator, against the composed back end."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import reference
from emulator.marks import EMULATED
from emulator.row_cases import ROWS, in_every_schedule, rows_with_ties, same_bits
from mlx_h2o import fast, use_backend
from mlx_h2o.operations import composed
from mlx_h2o.operations.composed import rows as composed_cache
from mlx_h2o.operations.gpu import cuda, metal

pytestmark = EMULATED


# accumulate_scores


def averages(batch: int, heads: tuple[int, int], queries: int, rows: int, masked: float = 0.3):
    """C with unscored rows, and scores of which a share is masked, and a few are NaN."""
    rng = np.random.default_rng([batch, *heads, queries, rows])
    before = rng.random((batch, heads[1], rows)).astype(np.float32)
    before[rng.random(before.shape) < 0.4] = np.nan
    scores = (rng.standard_normal((batch, heads[0], queries, rows)) * 4).astype(np.float32)
    scores[rng.random(scores.shape) < masked] = -np.inf
    if masked:
        scores[rng.random(scores.shape) < 0.05] = np.nan
    return mx.array(before), mx.array(scores)


@pytest.mark.slow
@pytest.mark.matrix(4)
@pytest.mark.parametrize("rows", ROWS)
def test_accumulate_one_query_is_bit_equal(rows: int) -> None:
    for heads in ((1, 1), (4, 2), (24, 3)):
        for masked in (0.0, 0.3, 1.0):
            before, scores = averages(2, heads, 1, rows, masked)
            found = in_every_schedule(
                lambda b=before, s=scores: fast.accumulate_scores(b, s, decay=0.95)
            )
            with use_backend("composed"):
                expected = fast.accumulate_scores(before, scores, decay=0.95)
            assert same_bits(found, expected)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("queries", [*range(2, 9), 128])
def test_accumulate_several_queries(queries: int) -> None:
    for heads, masked in (((4, 2), 0.0), ((4, 2), 0.5), ((6, 1), 0.9)):
        before, scores = averages(2, heads, queries, 40, masked)
        found = in_every_schedule(
            lambda b=before, s=scores: fast.accumulate_scores(b, s, decay=0.7)
        )
        expected = reference.accumulate(before, scores, decay=0.7)
        np.testing.assert_allclose(np.array(found), expected, rtol=1e-6, atol=1e-7)
        with use_backend("composed"):
            composed = fast.accumulate_scores(before, scores, decay=0.7)
        np.testing.assert_allclose(np.array(found), np.array(composed), rtol=2e-6, atol=1e-7)


@pytest.mark.usefixtures("emulator")
def test_accumulate_takes_any_strides() -> None:
    before, scores = averages(2, (4, 2), 3, 40)
    expected = fast.accumulate_scores(before, scores, decay=0.9)
    wide = mx.contiguous(mx.repeat(before, 2, axis=2))[:, :, ::2]
    turned = mx.contiguous(scores.swapaxes(1, 3)).swapaxes(1, 3)
    assert same_bits(fast.accumulate_scores(wide, turned, decay=0.9), expected)
    sliced = mx.concatenate([before, before], axis=2)[:, :, :40]
    assert same_bits(fast.accumulate_scores(sliced, scores, decay=0.9), expected)


# keep_rows


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("worth", [-np.inf, np.inf, np.nan, -0.0, 3.0], ids=str)
def test_of_equals_the_highest_position_goes(worth: float) -> None:
    positions = mx.array(np.random.default_rng(5).permutation(600).astype(np.int32)[None, None])
    found = fast.keep_indices(mx.full((1, 1, 600), worth), positions, keep=599)
    assert mx.argmax(positions).item() not in found.tolist()[0][0]
    found = fast.keep_indices(mx.full((1, 1, 600), worth), -1 - positions, keep=599)
    assert found.tolist() == [[[*range(599)]]]  # all of them padding: the last slot goes


# The Metal back end


def test_metal_back_end_accumulates(gpu) -> None:
    gpu()
    given = averages(2, (4, 2), 1, 40)
    expected = composed_cache.accumulate_scores(*given, decay=0.9)
    assert same_bits(metal.BACKEND.accumulate_scores(*given, decay=0.9), expected)
    assert metal._metal_kernel.cache_info().currsize == 1


@pytest.mark.parametrize("backend", [metal, cuda], ids=["metal", "cuda"])
def test_a_cpu_stream_is_served_by_the_composition(backend) -> None:
    given, on_cpu = averages(2, (4, 2), 1, 40), {"decay": 0.9, "stream": mx.Device(mx.cpu)}
    expected = composed_cache.accumulate_scores(*given, **on_cpu)
    assert same_bits(backend.BACKEND.accumulate_scores(*given, **on_cpu), expected)


def test_metal_back_end_chooses_rows(gpu) -> None:
    gpu()
    scores, positions = rows_with_ties(6, 2, 40)
    for keep in (39, 38):
        kept = metal.BACKEND.keep_indices(scores, positions, keep=keep, sink_size=3)
        expected = composed.keep_indices(scores, positions, keep=keep, sink_size=3)
        assert mx.array_equal(kept, expected)
        assert metal._metal_kernel.cache_info().currsize == 1
