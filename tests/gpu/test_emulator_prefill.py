"""The kernels that score a chunk of queries, run by the emulator, against the reference."""

from __future__ import annotations

import math
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from emulator import EmulatorBackend, Run
from emulator.cases import DTYPES
from emulator.marks import EMULATED
from emulator.row_cases import in_every_schedule, on_the_emulator
from mlx_h2o import fast, use_backend
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.composed import prefill as composed_prefill
from mlx_h2o.operations.gpu import cuda, metal
from mlx_h2o.operations.requests import attention_request
from operations.test_prefill import KINDS, MASKS, SCALE, expected_of, mask_of
from operations.test_prefill import arrays as chunk

pytestmark = EMULATED

arrays = partial(chunk, size=32)

# Astride the keys of a simdgroup (4) and of a threadgroup (32), and a few of them.
ROWS = (1, 3, 4, 5, 31, 32, 33, 63, 64, 65)


def check(found: mx.array, expected: np.ndarray) -> None:
    assert found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found), expected, rtol=3e-5, atol=3e-6)


@pytest.mark.slow
@pytest.mark.matrix(4)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_reference_in_every_schedule(kind: str, mask: str) -> None:
    # More queries than keys, too; groups of one head, and of all.
    for heads, length, keys in (((4, 2), 9, 33), ((2, 2), 1, 5), ((6, 1), 12, 7)):
        q, k = arrays(1, heads, length, keys)
        given = mask_of(mask, q, k)
        call = partial(fast.prefill_scores, q, k, scale=SCALE, mask=given, kind=kind)
        check(in_every_schedule(call), expected_of(kind, q, k, given))


@pytest.mark.slow
@pytest.mark.matrix(8)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_keys(kind: str, rows: int) -> None:
    for length, mask in ((3, "causal"), (5, "")):
        q, k = arrays(rows, length=length, keys=rows)
        call = partial(fast.prefill_scores, q, k, scale=SCALE, mask=mask or None, kind=kind)
        check(in_every_schedule(call), expected_of(kind, q, k, mask or None))


@pytest.mark.slow
@pytest.mark.matrix(3)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 127, 128, 129])
def test_every_number_of_queries(length: int) -> None:
    q, k = arrays(length, (2, 1), length, 40)
    for kind in KINDS:
        call = partial(fast.prefill_scores, q, k, scale=SCALE, mask="causal", kind=kind)
        check(on_the_emulator(call), expected_of(kind, q, k, "causal"))


@pytest.mark.slow
@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("size", "dtype"), [(64, "bf16"), (96, "f32"), (128, "f16"), (128, "bf16"), (576, "f16")]
)
def test_every_width_and_dtype(size: int, dtype: str) -> None:
    for kind in KINDS:
        q, k = chunk(size, (2, 1), 6, 20, size, DTYPES[dtype])
        call = partial(fast.prefill_scores, q, k, scale=SCALE, mask="causal", kind=kind)
        check(on_the_emulator(call), expected_of(kind, q, k, "causal"))


@pytest.mark.parametrize("mask", MASKS)
def test_the_average_goes_on_and_takes_the_last_queries(mask: str) -> None:
    q, k = arrays(2, (6, 2), 11)
    rng = np.random.default_rng(4)
    before = rng.random(k.shape[:3]).astype(np.float32)
    before[rng.random(before.shape) < 0.4] = np.nan
    given = mask_of(mask, q, k)
    for queries in (1, 4, 11):
        options = {"importance": mx.array(before), "decay": 0.7, "queries": queries}
        call = partial(fast.prefill_scores, q, k, scale=SCALE, mask=given, **options)
        check(on_the_emulator(call), expected_of("ema", q, k, given, **options))


@pytest.mark.slow
def test_sinks_take_their_share_of_the_mass() -> None:
    q, k = arrays(7)
    sinks = mx.array([0.5, -math.inf, 3.0, -1.0]).astype(mx.float16)
    for mask in ("", "bool", "add"):
        given = mask_of(mask, q, k)
        call = partial(fast.prefill_scores, q, k, scale=SCALE, mask=given, sinks=sinks, kind="mass")
        check(in_every_schedule(call), expected_of("mass", q, k, given, sinks=sinks))


@pytest.mark.slow
def test_large_logits_overflow_nothing() -> None:
    q, k = arrays(9)
    call = partial(fast.prefill_scores, 1e4 * q, k, scale=1.0, kind="mass")
    found = np.array(on_the_emulator(call))
    np.testing.assert_allclose(found.sum(axis=-1), 2 * 9, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("defines", [(), ("H2O_LOOSE_NAN",)], ids=["exact", "loose"])
def test_nan_in_a_mask(defines: tuple[str, ...]) -> None:
    """The average takes it for masked; the mass of its KV head is lost, that of no other."""
    q, k = arrays(10)
    bias = np.zeros((2, 4, 9, 33), np.float32)
    bias[1, 2, 3, 5] = np.nan
    masked = np.where(np.isnan(bias), np.float32(-np.inf), bias)
    backend = EmulatorBackend(Run(defines=defines))

    def scores(mask: np.ndarray, kind: str) -> mx.array:
        call = partial(fast.prefill_scores, q, k, scale=SCALE, mask=mx.array(mask), kind=kind)
        return on_the_emulator(call, backend)

    assert mx.array_equal(scores(bias, "ema"), scores(masked, "ema"))
    mass = np.isnan(np.array(scores(bias, "mass")))
    lost = np.zeros((2, 2), bool)
    lost[1, 1] = True
    assert np.array_equal(mass.all(-1), lost) and mass.any(-1).sum() == 1


def test_any_strides() -> None:
    q, k = arrays(11, size=64, keys=40)
    apart = q[..., ::2], k[:, :, 3:36, ::2]
    dense = tuple(mx.contiguous(a) for a in apart)
    for kind in KINDS:
        one, other = (
            on_the_emulator(partial(fast.prefill_scores, *a, scale=SCALE, kind=kind))
            for a in (apart, dense)
        )
        assert mx.array_equal(one, other)


@pytest.mark.slow
def test_the_keys_are_read_once_and_nothing_of_queries_by_keys_is_written() -> None:
    q, k = arrays(12, (4, 2), 130, 140)
    reads: dict[str, int] = {}
    outputs = []

    class Noting(EmulatorBackend):
        def execute(self, each, inputs, stream):
            outputs.extend(each.output_shapes)
            return super().execute(each, inputs, stream)

    call = partial(fast.prefill_scores, q, k, scale=SCALE, mask="causal")
    on_the_emulator(call, Noting(Run(reads=reads)))
    assert reads["keys"] == k.nbytes
    assert reads["queries"] == 2 * 4 * 128 * 32 * 4  # those that count
    assert outputs == [(2, 2, 140)]
    on_the_emulator(partial(call, kind="mass"), Noting())
    assert outputs[1:] == [(2, 4, 130), (2, 2, 140)]


def test_other_head_sizes_and_a_cpu_stream_are_composed() -> None:
    q, k = arrays(14, size=40)
    expected = fast.prefill_scores(q, k, scale=SCALE)
    found = on_the_emulator(partial(fast.prefill_scores, q, k, scale=SCALE))
    assert mx.allclose(found, expected, rtol=1e-6)
    q, k = arrays(15)
    for backend in (metal, cuda):
        request = attention_request(q, k, k, scale=SCALE, stream=mx.Device(mx.cpu))
        found = backend.BACKEND.prefill_scores(request, None, 0.95)
        assert mx.array_equal(found, composed_prefill.prefill_scores(request, None, 0.95))


@pytest.mark.parametrize("kind", KINDS)
def test_metal_back_end_scores_a_chunk(kind: str, gpu) -> None:
    gpu()
    q, k = arrays(16)
    with use_backend("metal"):
        assert resolve().prefill_scores == metal.BACKEND.prefill_scores
        found = fast.prefill_scores(q, k, scale=SCALE, mask="causal", kind=kind)
    check(found, expected_of(kind, q, k, "causal"))
    assert metal._metal_kernel.cache_info().currsize == (2 if kind == "mass" else 1)
