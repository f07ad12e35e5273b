"""The kernels on a cache's rows, run by the emulator, against the composed back end."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

import reference
from emulator.marks import EMULATED
from emulator.row_cases import ROWS, in_every_schedule, on_the_emulator, rows_with_ties
from mlx_h2o import fast, use_backend
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.composed import turbo

pytestmark = EMULATED


# keep_rows


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("worth", [-np.inf, np.inf, np.nan, -0.0, 3.0], ids=str)
def test_of_equals_the_highest_position_goes(worth: float) -> None:
    positions = mx.array(np.random.default_rng(5).permutation(600).astype(np.int32)[None, None])
    found = fast.keep_indices(mx.full((1, 1, 600), worth), positions, keep=599)
    assert mx.argmax(positions).item() not in found.tolist()[0][0]
    found = fast.keep_indices(mx.full((1, 1, 600), worth), -1 - positions, keep=599)
    assert found.tolist() == [[[*range(599)]]]  # all of them padding: the last slot goes


def zones_of(rows: int) -> tuple[dict[str, int | mx.array], ...]:
    clocks = mx.array([3 * rows - rows // 2, 2 * rows], mx.int32)
    return (
        {},
        {"sink_size": 3, "recent_start": clocks},
        {"sink_size": 3, "recent_start": 3 * rows - rows // 2},
        {"sink_size": 2**31 - 1},
        {"recent_start": 2**31 - 1},
        {"recent_start": -7},
    )


@pytest.mark.slow
@pytest.mark.matrix(4)
@pytest.mark.parametrize("rows", ROWS)
def test_the_rows_kept_are_the_composed_ones(rows: int) -> None:
    scores, positions = rows_with_ties(1, 4, rows)
    for keep in sorted({1, rows // 3, rows - 1, rows} - {0}):
        for zones in zones_of(rows)[: None if rows < 300 else 2]:
            call = partial(fast.keep_indices, scores, positions, keep=keep, **zones)
            found = in_every_schedule(call) if rows < 300 else on_the_emulator(call)
            assert found.dtype == mx.uint32 and found.shape == (2, 4, keep)
            assert np.array_equal(
                np.array(found), reference.keep_indices(scores, positions, keep=keep, **zones)
            )
            with use_backend("composed"):
                assert mx.array_equal(found, call())


def test_any_schedule_and_any_strides() -> None:
    scores, positions = rows_with_ties(2, 4, 300)
    call = partial(fast.keep_indices, scores, positions, keep=77, sink_size=4)
    expected = in_every_schedule(call)
    turned = [mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2) for a in (scores, positions)]
    assert mx.array_equal(
        on_the_emulator(partial(fast.keep_indices, *turned, keep=77, sink_size=4)), expected
    )


@pytest.mark.slow
def test_every_bit_of_score_and_position_counts() -> None:
    """Neighbouring floats of both signs, subnormals too, and positions up to the last one."""
    bits = np.array([[0, 1, 2, 0x00800000, 0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000]])
    magnitudes = bits.astype(np.uint32).view(np.float32)
    scores = np.concatenate([magnitudes, -magnitudes], axis=1)[None]
    rng = np.random.default_rng(3)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(16)
        positions = rng.choice(2**30 - 1, 16, replace=False).astype(np.int32)
        positions[seed] = 2**30 - 1
        given = mx.array(scores[..., order]), mx.array(positions[None, None])
        for keep in range(1, 16):
            found = on_the_emulator(partial(fast.keep_indices, *given, keep=keep))
            assert np.array_equal(np.array(found), reference.keep_indices(*given, keep=keep))


# encode_rows


@pytest.mark.slow
def test_encoding_takes_any_strides_in_any_schedule() -> None:
    wide = mx.random.normal((2, 5, 3, 256), key=mx.random.key(3)).astype(mx.float16)
    rows = wide.swapaxes(1, 2)[..., ::2]
    found, dense = (
        in_every_schedule(lambda given=given: resolve().encode_rows(given, 3, turbo.KEYS))
        for given in (rows, mx.contiguous(rows))
    )
    assert all(map(mx.array_equal, found, dense))
