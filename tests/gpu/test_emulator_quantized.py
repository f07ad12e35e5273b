"""The Metal text for packed keys and values, run by the emulator."""

import math
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import pytest

from emulator import EmulatorBackend
from emulator.cases import DTYPES, Case, check_schedules, errors
from emulator.marks import EMULATED
from emulator.row_cases import same_bits
from gpu.test_emulator import columns, heads_inside, interleaved
from mlx_h2o.config import KV_FORMATS
from mlx_h2o.operations.gpu import metal

pytestmark = EMULATED

EIGHT, FOUR = (8, 8), (4, 4)


def _cases() -> Iterator[Case]:
    for size in (32, 64, 96, 128, 192, 256):
        for bits in (EIGHT, FOUR):
            yield Case(dtype="f16", sizes=(size, size), bits=bits, group=32, rows=35)
    for sizes in ((576, 512), (128, 192), (192, 128), (512, 512)):
        yield Case(dtype="bf16", sizes=sizes, bits=(4, 8), group=64, rows=35)
    for group in (32, 64, 128):
        yield Case(sizes=(128, 256), bits=(8, 4), group=group, rows=35)
    for bits in ((2, 3), (5, 6), (3, 2), (6, 5)):
        yield Case(sizes=(96, 160), bits=bits, group=32, rows=35)
        yield Case(sizes=(128, 64), bits=bits, group=64, rows=35)
    for rows in (1, 31, 32, 33, 1023, 1024, 1025):
        yield Case(dtype="f16", sizes=(128, 128), rows=rows, slack=3, bits=EIGHT)
    for group in (1, 4, 16):
        yield Case(dtype="f16", heads=(2 * group, 2), queries=2, mask="causal", bits=FOUR, slack=1)
    for queries in (5, 8):
        yield Case(mask="causal", queries=queries, rows=9, heads=(3, 3), batch=2, bits=EIGHT)
    for index, dtype in enumerate(DTYPES):
        scales = [*DTYPES][index - 1]
        for mask in ("bool", f"add-{dtype}"):
            for blocks in (None, 3):
                yield Case(
                    dtype=dtype, mask=mask, sinks=dtype, queries=2, batch=2, heads=(4, 2), rows=70,
                    blocks=blocks, bits=(8, 4), scales=scales, slack=2,
                )  # fmt: skip
    for blocks, rows in ((2, 7), (2, 8), (2, 9), (32, 70)):
        yield Case(blocks=blocks, rows=rows, simdgroups=4, bits=EIGHT, sinks="f32")
    yield Case(bits=EIGHT, scores=False, lse=False)
    yield Case(bits=EIGHT, scores=False, blocks=2)
    yield from _sparse_cases()
    yield from _codes()


def _codes() -> Iterator[Case]:
    for index, kv_format in enumerate(KV_FORMATS):
        sizes = ((128, 128), (64, 32), (32, 256), (256, 64))[index % 4]
        dtype = [*DTYPES][index % 3]
        case = Case(
            dtype=dtype, kv_format=kv_format, sizes=sizes, group=32, rows=35, slack=index % 3
        )
        yield case
        mask, biased = ("causal", "bool", f"add-{dtype}")[index % 3], index % 2 == 0
        flags = {"mask": mask, "sinks": dtype, "queries": 2, "heads": (4, 2), "bias": biased}
        yield replace(case, blocks=(None, 3)[index % 2], rows=70, batch=2, **flags)
        yield replace(
            case, sparse=3e-3, skipped=True, rows=100, blocks=(3, None)[index % 2], **flags
        )
    for rows in (1, 33, 1025):
        yield Case(dtype="f16", kv_format="turbo3", sizes=(128, 128), rows=rows, slack=1)


def _sparse_cases() -> Iterator[Case]:
    sparse = Case(bits=EIGHT, sparse=3e-3, skipped=True)
    for blocks in (None, 2, 3):
        for rows in (1, 7, 8, 9, 300):
            yield replace(sparse, rows=rows, simdgroups=4, blocks=blocks)
        for skipped in (False, True):
            yield replace(
                sparse, bits=(8, 4), rows=100, mask="add-f32", sinks="f32", queries=2, heads=(4, 2),
                skipped=skipped, simdgroups=4, blocks=blocks, slack=2,
            )  # fmt: skip
        yield replace(
            sparse, dtype="f16", bits=FOUR, rows=70, mask="bool", scores=False, lse=False,
            simdgroups=4, blocks=blocks,
        )  # fmt: skip
    # Astride simdgroups, the second launch, and the number of blocks.
    for rows in (31, 32, 33, 1023, 1024, 1025, 2047, 2048, 2049):
        yield replace(sparse, rows=rows, sparse=3e-4, mask="causal", queries=2, heads=(1, 1))
    yield Case(bits=EIGHT, rows=33, skipped=True)


CASES = list(dict.fromkeys(_cases()))


@pytest.mark.slow
@pytest.mark.matrix(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_reference_in_every_schedule(case: Case) -> None:
    check_schedules(case)


@pytest.mark.slow
def test_any_strides() -> None:
    sizes = {"heads": (4, 2), "batch": 2, "queries": 2, "rows": 40, "slack": 2}
    request = Case(bits=(8, 4), group=32, **sizes).request()
    expected = EmulatorBackend().attend(request)

    for view in (columns, interleaved, heads_inside):
        keys, values = (tuple(map(view, rows)) for rows in (request.keys, request.values))
        found = EmulatorBackend().attend(replace(request, keys=keys, values=values))
        assert all(map(same_bits, expected, found))


@pytest.mark.slow
def test_rows_that_are_masked_are_not_read() -> None:
    request = Case(mask="bool", heads=(2, 2), bits=EIGHT).request()
    masked = mx.logical_not(request.mask)[:, :, 0, :, None]

    def poisoned(rows):
        words, scales, biases = rows
        return words, mx.where(masked, math.nan, scales), biases

    other = replace(request, keys=poisoned(request.keys), values=poisoned(request.values))
    clean, found = (EmulatorBackend().attend(each) for each in (request, other))
    assert all(map(same_bits, clean, found))


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("rows", "sparse_passes", "passes"), [(40, [256], [256]), (1030, [256, 256, 32], [256, 32])]
)
def test_metal_back_end_runs_it(
    gpu, rows: int, sparse_passes: list[int], passes: list[int]
) -> None:
    calls = gpu(300).calls
    case = Case(rows=rows, bits=EIGHT, sinks="f32", sparse=1e-4, skipped=True)
    request = case.request()
    assert max(errors(request, metal.BACKEND.attend(request)).values()) <= 1
    assert calls == [1024, 512, *sparse_passes, *sparse_passes]
    # Without the threshold, and with other bits, they are other kernels.
    for other in (
        replace(case, sparse=0.0),
        Case(rows=rows, bits=FOUR),
        Case(rows=rows, mask="bool"),
    ):
        calls.clear()
        metal.BACKEND.attend(other.request())
        assert calls == [1024, 512, *passes, *passes]
