"""The Metal back end with the emulator in the place of MLX's launches, and both on CPU streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import pytest

from emulator.marks import EMULATED
from emulator.row_cases import rows_with_ties
from gpu.test_emulator_rows import averages
from mlx_h2o import fast, use_backend
from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.gpu import cuda, metal
from operations.test_prefill import SCALE, arrays

pytestmark = EMULATED


def appending() -> Callable[..., list[mx.array]]:
    """New rows of keys and values as codes."""
    rows = [mx.random.normal((2, 2, 9, 64), key=mx.random.key(at)) for at in range(3)]
    codes = [tuple(turbo.encode_rows(each, 3, turbo.KEYS)) for each in rows[:2]]
    slots = mx.array([[[3, 8], [0, 1]], [[8, 2], [5, 4]]], mx.uint32)
    new = rows[2][:, :, :2], rows[2][:, :, 2:4]

    def call(**given: object) -> list[mx.array]:
        return [*sum(fast.quantize_append(*codes, *new, slots, bits=3, **given), ())]

    return call


CALLS: dict[str, tuple[Callable[..., object], int]] = {
    "accumulate": (partial(fast.accumulate_scores, *averages(2, (4, 2), 1, 40), decay=0.9), 1),
    "keep 39": (partial(fast.keep_indices, *rows_with_ties(6, 2, 40), keep=39, sink_size=3), 1),
    "keep all": (partial(fast.keep_indices, *rows_with_ties(6, 2, 40), keep=40), 0),
    "average": (partial(fast.prefill_scores, *arrays(16), scale=SCALE, mask="causal"), 1),
    "mass": (partial(fast.prefill_scores, *arrays(16), scale=SCALE, kind="mass"), 2),
    "append": (appending(), 1),
}


def check_same(found: object, expected: object) -> None:
    pairs = (
        [(found, expected)] if isinstance(found, mx.array) else zip(found, expected, strict=True)
    )
    for one, other in pairs:
        one, other = (each.astype(mx.float32) for each in (one, other))
        assert mx.allclose(one, other, rtol=3e-5, atol=3e-6, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_metal_back_end_runs_the_kernels(name: str, gpu: Callable[[], object]) -> None:
    gpu()
    call, kernels = CALLS[name]
    with use_backend("metal"):
        found = call()
    with use_backend("composed"):
        check_same(found, call())
    assert metal._metal_kernel.cache_info().currsize == kernels


@pytest.mark.parametrize("backend", [metal.BACKEND, cuda.BACKEND], ids=["metal", "cuda"])
@pytest.mark.parametrize("name", CALLS)
def test_on_a_cpu_stream_the_composition_serves(
    name: str, backend: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "unavailable_reason", lambda: "")
    results = []
    for each in (backend.name, "composed"):
        with use_backend(each):
            results.append(CALLS[name][0](stream=mx.cpu))
    check_same(*results)
