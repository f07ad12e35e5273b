"""Faults in the Metal text of the operations on rows: the emulator catches each of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import mlx.core as mx
import numpy as np
import pytest

import reference_turbo
from emulator import EmulatorBackend, KernelError, Run
from emulator.marks import EMULATED
from emulator.row_cases import SCHEDULES, arrays_of, on_the_emulator, rows_with_ties
from faults.metal import in_one_kernel, seeded
from faults.text import table
from mlx_h2o import fast, use_backend
from mlx_h2o.operations import backends
from mlx_h2o.operations.composed import turbo
from operations.test_prefill import SCALE, arrays, before_of, mask_of

pytestmark = EMULATED

FAULTS = table("rows")
LOOSE = Run(defines=("H2O_LOOSE_NAN",))
Call = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """Calls on rows, of which the composition says what they give."""

    calls: Callable[[], list[Call]]
    runs: tuple[Run, ...] = SCHEDULES
    nearly: bool = False

    def is_wrong(self, call: Call, backend: EmulatorBackend) -> bool:
        try:
            found = on_the_emulator(call, backend)
        except KernelError:
            return True
        return not all(map(self.equal, arrays_of(found), arrays_of(expected_result(call))))

    def equal(self, one: mx.array, other: mx.array) -> bool:
        if self.nearly:
            return np.allclose(np.array(one), np.array(other), 1e-3, 1e-4, equal_nan=True)
        return bool(mx.array_equal(one, other, equal_nan=True))


@cache
def calls_of(work: Work) -> list[Call]:
    return work.calls()


@cache
def expected_result(call: Call) -> object:
    with use_backend("composed"):
        return call()


def keeping() -> list[Call]:
    last_bits = 0x3F800000 + np.random.default_rng(1).integers(0, 4, (2, 16, 40))
    rows, few = rows_with_ties(4, 16, 1500), rows_with_ties(4, 16, 40)
    close = mx.array(last_bits.astype(np.uint32).view(np.float32)), few[1]
    return [
        partial(fast.keep_indices, *rows, keep=700, sink_size=1400),
        partial(fast.keep_indices, *few, keep=22),
        partial(fast.keep_indices, *close, keep=38),
        partial(fast.keep_indices, *few, keep=39),
        partial(fast.keep_indices, *rows, keep=1490, recent_start=mx.array([4400, 10])),
    ]


def stepping() -> list[Call]:
    """Steps of two queries: one sees nothing, rows are new, and there are more than are scored."""
    queries, keys = arrays(13, (4, 2), 2, 37)
    before = before_of(mx.zeros((2, 300, 3))).swapaxes(1, 2)[:, :2]
    mask = mask_of("bool", queries, keys)
    mask[1, 2, 0] = False
    given = queries, keys, keys, before
    return [partial(_step, *given, mask=one) for one in (None, mask)]


def _step(*given: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array]:
    return backends.resolve().attention_and_accumulate(
        *given, scale=SCALE, decay=None, causal=False, mask=mask
    )


def encoding() -> list[Call]:
    """Rows of which a lane has several elements; one of them zeros."""
    rows = mx.random.normal((1, 2, 3, 128), key=mx.random.key(1))
    rows[:, 1, 2] = 0
    return [lambda: _read(backends.resolve().encode_rows(rows, 3, turbo.KEYS))]


def _read(parts: tuple[mx.array, mx.array]) -> list[mx.array]:
    """What they stand for: where an element lies at the mean of two levels either code is right.
    And the words of the row of zeros, which stand for zeros whatever they are."""
    rows = reference_turbo.rows(*parts, bits=3, side="keys")
    return [mx.array(rows.astype(np.float32)), parts[1], parts[0][0, 1, 2]]


WORK = {
    "keep": Work(keeping, runs=(Run(), Run("random", seed=1))),
    "mass": Work(stepping, nearly=True, runs=(Run(), LOOSE)),
    "encode": Work(encoding, nearly=True),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_the_kernels_without_a_fault_pass(work: Work) -> None:
    for call in calls_of(work):
        assert not any(work.is_wrong(call, EmulatorBackend(run)) for run in work.runs)


@pytest.mark.parametrize(("kind", "name"), [(one, name) for one in FAULTS for name in FAULTS[one]])
def test_fault_is_caught(kind: str, name: str) -> None:
    work, edit = WORK[kind], FAULTS[kind][name]
    tries = [
        (call, seeded(edit, EmulatorBackend(run))) for call in calls_of(work) for run in work.runs
    ]
    assert any(work.is_wrong(call, backend) for call, backend in tries), "it went unnoticed"
    in_one_kernel(edit, [kernel for _, backend in tries for kernel in backend.edited])
