"""The kernels that score a chunk of queries, run by the emulator, against the reference."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from emulator import EmulatorBackend, Run
from emulator.cases import DTYPES
from emulator.marks import EMULATED
from emulator.row_cases import in_every_schedule, on_the_emulator
from mlx_h2o import fast
from operations.test_prefill import (
    MASKS,
    SCALE,
    check_nan_in_a_mask,
    expected_of,
    mask_of,
)
from operations.test_prefill import arrays as chunk

pytestmark = EMULATED

arrays = partial(chunk, size=32)


def check(found: mx.array, expected: np.ndarray) -> None:
    assert found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found), expected, rtol=3e-5, atol=3e-6)


# Heads, queries and keys: groups of one head and of all; keys astride those of a simdgroup (4) and
# of a threadgroup (32), and a few of them.
SHAPES = [((4, 2), 9, 33), ((2, 2), 1, 5), ((6, 1), 12, 7)]
SHAPES += [((4, 2), 3, rows) for rows in (3, 4, 31, 32, 63, 64, 65)]
SHAPES += [((2, 1), length, 40) for length in (2, 5, 8, 127, 128, 129)]
WIDTHS = ((64, "bf16"), (96, "f32"), (128, "f16"), (128, "bf16"), (576, "f16"))


@pytest.mark.slow
@pytest.mark.matrix(4)
@pytest.mark.parametrize("mask", MASKS)
def test_equals_the_reference_in_every_schedule(mask: str) -> None:
    for heads, length, keys in SHAPES:
        if mask in ("", "causal") or keys > 4:
            q, k = arrays(1, heads, length, keys)
            given = mask_of(mask, q, k)
            call = partial(fast.prefill_scores, q, k, scale=SCALE, mask=given, kind="mass")
            run = in_every_schedule if length < 100 else on_the_emulator
            check(run(call), expected_of("mass", q, k, given))


@pytest.mark.slow
@pytest.mark.matrix(2)
@pytest.mark.parametrize(("size", "dtype"), WIDTHS)
def test_every_width_and_dtype(size: int, dtype: str) -> None:
    q, k = chunk(size, (2, 1), 6, 20, size, DTYPES[dtype])
    call = partial(fast.prefill_scores, q, k, scale=SCALE, mask="causal", kind="mass")
    check(on_the_emulator(call), expected_of("mass", q, k, "causal"))


@pytest.mark.slow
@pytest.mark.parametrize("defines", [(), ("H2O_LOOSE_NAN",)], ids=["exact", "loose"])
def test_nan_in_a_mask(defines: tuple[str, ...]) -> None:
    backend = EmulatorBackend(Run(defines=defines))
    check_nan_in_a_mask(lambda call: on_the_emulator(call, backend))


@pytest.mark.slow
def test_each_kernel_reads_the_keys_once_and_writes_nothing_of_queries_by_keys() -> None:
    q, k = arrays(12, (4, 2), 130, 140)
    reads: dict[str, int] = {}
    outputs = []

    class Noting(EmulatorBackend):
        def execute(self, each, inputs, stream):
            outputs.extend(each.output_shapes)
            return super().execute(each, inputs, stream)

    call = partial(fast.prefill_scores, q, k, scale=SCALE, mask="causal", kind="mass")
    on_the_emulator(call, Noting(Run(reads=reads)))
    assert reads["keys"] == 2 * k.nbytes
    assert outputs == [(2, 4, 130), (2, 2, 140)]


def test_other_head_sizes_are_composed() -> None:
    q, k = arrays(14, size=40)
    call = partial(fast.prefill_scores, q, k, scale=SCALE, kind="mass")
    expected, found = call(), on_the_emulator(call)
    assert mx.allclose(found, expected, rtol=1e-6)
