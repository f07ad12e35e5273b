"""The Metal text, run by the emulator, against the float64 reference."""

import math
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from emulator import EmulatorBackend, KernelError, Run, metal_kernel
from emulator.cases import DTYPES, Case, check_schedules, errors
from emulator.marks import EMULATED
from mlx_h2o.operations.gpu import kernels, metal
from mlx_h2o.operations.requests import AttentionRequest

pytestmark = EMULATED

SIZES = [32, 64, 96, 128, 192, 256, 512, 576, (192, 128), (64, 128), (576, 512)]
ROWS = [1, 31, 32, 33, 1023, 1024, 1025]


def _cases() -> Iterator[Case]:
    for index, size in enumerate(SIZES):
        sizes = size if isinstance(size, tuple) else (size, size)
        for dtype in DTYPES if size in (64, 128) else [[*DTYPES][index % 3]]:
            yield Case(dtype=dtype, sizes=sizes, rows=35, mask="causal", queries=2)
    for rows in ROWS:
        yield Case(dtype="f16", sizes=(128, 128), rows=rows, heads=(4, 2), slack=3)
    for queries in range(1, 9):
        yield Case(mask="causal", queries=queries, rows=[33, 3][queries % 2], heads=(3, 3), batch=2)
    for group in (1, 2, 4, 8, 16):
        yield Case(dtype="bf16", heads=(2 * group, 2), queries=2, rows=40, mask="causal", slack=1)
    for dtype in DTYPES:
        for mask in ("bool", f"add-{dtype}", "add-f32"):
            yield Case(dtype=dtype, mask=mask, sinks=dtype, queries=3, batch=2, heads=(4, 2))
    yield Case(mask="bool", rows=5)  # a mask of few elements comes in another address space
    yield Case(mask="add-f32", rows=7, lse=False)
    for index, mask in enumerate(("", "causal", "bool", "add-f16")):
        dtype = [*DTYPES][index % 3]
        yield Case(dtype=dtype, mask=mask, bias=True, queries=2, heads=(4, 2), batch=2, slack=index)
    yield Case(sinks="f32", heads=(8, 2))
    yield Case(sinks="f16", scores=False)
    yield Case(scores=False, lse=False)
    yield Case(lse=False, batch=3)
    for simdgroups in (16, 8, 4, 1):
        yield Case(simdgroups=simdgroups, heads=(2, 2), rows=50, mask="causal", queries=2)
    yield from _two_pass_cases()


def _two_pass_cases() -> Iterator[Case]:
    """In small: blocks without a key, a key more or less than a turn of all blocks."""
    for rows in (1, 7, 8, 9, 63, 64, 65):
        yield Case(rows=rows, blocks=2, simdgroups=4, sinks="f32", heads=(2, 2))
    for blocks in (2, 3, 31, 32):
        yield Case(blocks=blocks, rows=70, simdgroups=2, mask="causal", queries=3, batch=2)
    for dtype in DTYPES:
        for mask in ("bool", f"add-{dtype}"):
            yield Case(
                dtype=dtype, mask=mask, sinks=dtype, queries=2, heads=(4, 2), blocks=4, rows=150
            )
    for sizes in ((96, 96), (192, 128), (576, 512)):
        yield Case(dtype="f16", sizes=sizes, blocks=2, rows=70, slack=2)
    yield Case(blocks=2, scores=False, rows=70)
    yield Case(blocks=3, bias=True, sinks="f32", mask="causal", queries=2, heads=(4, 2), rows=70)
    yield Case(blocks=2, lse=False, rows=70)
    yield Case(dtype="f16", sizes=(128, 128), rows=2049, heads=(2, 1), slack=1)  # four by rule


CASES = list(dict.fromkeys(_cases()))


@pytest.mark.slow
@pytest.mark.matrix(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_reference_in_every_schedule(case: Case) -> None:
    check_schedules(case)


def plain_request(**changes: object) -> AttentionRequest:
    return replace(Case(heads=(4, 2), batch=2, queries=2, rows=40).request(), **changes)


def check(request: AttentionRequest, run: Run | None = None) -> None:
    result = EmulatorBackend(run or Run()).attend(request)
    assert max(errors(request, result).values()) <= 1, errors(request, result)


def columns(array: mx.array) -> mx.array:
    """The same values, with another last stride than 1."""
    return mx.contiguous(array.swapaxes(-1, -2)).swapaxes(-1, -2)


def interleaved(array: mx.array) -> mx.array:
    """The same values as every third element of something longer."""
    return mx.repeat(array, 3, axis=-1)[..., ::3]


def heads_inside(array: mx.array) -> mx.array:
    """The layout of a projection that was reshaped: [B, L, H, D] in memory."""
    return mx.contiguous(array.swapaxes(1, 2)).swapaxes(1, 2)


@pytest.mark.slow
def test_sinks_of_any_stride_and_biases_of_more_rows_than_there_are_keys() -> None:
    check(plain_request(sinks=mx.arange(8).astype(mx.float32)[::2]))
    bias = Case(heads=(4, 2), batch=2, rows=40, bias=True).request().row_bias
    wide = mx.concatenate([bias, mx.full((2, 2, 9), math.nan)], axis=2)
    check(plain_request(row_bias=wide))


# Metal does not say what max and the fast exp make of NaN: the answer must be the same.
@pytest.mark.slow
@pytest.mark.matrix(2)
@pytest.mark.parametrize("defines", [(), ("H2O_LOOSE_NAN",)], ids=["strict", "loose"])
@pytest.mark.parametrize("blocks", [None, 2], ids=["one pass", "two passes"])
@pytest.mark.parametrize("rows", [{}, {"bits": (8, 8), "sparse": 1e-3}], ids=["dense", "sparse"])
def test_nan_in_the_mask_stays_in_its_query(
    rows: dict[str, object], defines: tuple[str, ...], blocks: int | None
) -> None:
    request = Case(mask="add-f32", queries=4, heads=(4, 2), batch=2, **rows).request()
    mask = np.array(request.mask)
    clean = EmulatorBackend(blocks=blocks).attend(request)
    mask[1, 2, 3, 5] = math.nan
    mask[0, 0, 0, 6] = math.nan  # this query sees nothing else
    request = replace(request, mask=mx.array(mask))
    out, scores, lse, *_ = EmulatorBackend(Run(defines=defines), blocks=blocks).attend(request)
    hit = np.zeros((2, 4, 4), bool)
    hit[1, 2, 3] = hit[0, 0, 0] = True
    assert np.array_equal(np.isnan(np.array(lse)), hit)
    assert np.array_equal(np.isnan(np.array(out)).all(-1), hit)
    assert np.array_equal(np.isnan(np.array(scores)), np.isnan(mask))
    assert np.array_equal(np.array(out)[~hit], np.array(clean[0])[~hit])


@pytest.mark.slow
@pytest.mark.parametrize("defines", [(), ("H2O_LOOSE_NAN",)], ids=["strict", "loose"])
@pytest.mark.parametrize("blocks", [None, 2], ids=["one pass", "two passes"])
def test_nan_in_a_row_bias_stays_in_queries_that_meet_it(
    defines: tuple[str, ...], blocks: int | None
) -> None:
    request = Case(mask="bool", bias=True, queries=4, heads=(4, 2), batch=2).request()
    bias = np.array(request.row_bias)
    bias[:, :, 5] = math.nan
    request = replace(request, row_bias=mx.array(bias))
    out, scores, lse, *_ = EmulatorBackend(Run(defines=defines), blocks=blocks).attend(request)
    hit = np.array(request.mask)[..., 5]
    assert 0 < hit.sum() < hit.size
    assert np.array_equal(np.isnan(np.array(lse)), hit)
    assert np.array_equal(np.isnan(np.array(out)).all(-1), hit)
    assert np.array_equal(np.isnan(np.array(scores)).sum(-1), hit)
    check(request, Run(defines=defines))


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "tried"), [(1024, [1024]), (300, [1024, 512, 256])])
def test_metal_back_end_finds_its_simdgroups(gpu, limit: int, tried: list[int]) -> None:
    calls = gpu(limit).calls
    request = Case(mask="add-f32", sinks="f32", queries=2).request()
    assert max(errors(request, metal.BACKEND.attend(request)).values()) <= 1
    assert calls == [*tried, tried[-1]]
    metal.BACKEND.attend(request)
    assert calls == [*tried, tried[-1], tried[-1]]


def test_metal_back_end_reports_other_errors(gpu) -> None:
    gpu(16)
    with pytest.raises(ValueError, match="Thread group size"):
        metal.BACKEND.attend(plain_request())
    assert not metal.BACKEND.simdgroups


def test_back_ends_without_a_gpu_say_why() -> None:
    with mx.stream(mx.cpu):
        assert "found a CPU stream" in metal.BACKEND.refuses(plain_request())
    if not mx.metal.is_available():
        assert "no Metal device" in metal.BACKEND.unavailable_reason()


@pytest.mark.slow
def test_launch_rules() -> None:
    """A GPU would round a grid up, or refuse a threadgroup, without a word about the cause."""
    kernel = metal_kernel(
        "copy", ["x"], ["y"], "  y[thread_index_in_threadgroup] = x[0];", kernels.HEADER, False
    )
    arguments = {"output_shapes": [(64,)], "output_dtypes": [mx.float32]}
    x = mx.ones((9,))
    with pytest.raises(KernelError, match="expected a multiple of 32 threads, at most 1024"):
        kernel([x], grid=(48, 1, 1), threadgroup=(48, 1, 1), **arguments)
    with pytest.raises(KernelError, match="is not a multiple of threadgroup"):
        kernel([x], grid=(96, 1, 1), threadgroup=(64, 1, 1), **arguments)
    (y,) = kernel([x], grid=(64, 1, 1), threadgroup=(64, 1, 1), **arguments)
    assert mx.all(y == 1)
