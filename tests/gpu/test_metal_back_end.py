"""The Metal back end with the emulator in place of MLX's launches, and both on CPU streams."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from emulator import EmulatorBackend
from emulator.cases import CHUNKS, Case, check_chunk
from emulator.marks import EMULATED
from emulator.row_cases import arrays_of, rows_with_ties
from gpu.conftest import PipelineLimit
from mlx_h2o import fast, use_backend
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.gpu import backend, cuda, launch, metal, mlx_attention
from mlx_h2o.operations.gpu.kernels import compiled
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


def stepping() -> Callable[..., list[mx.array]]:
    """A step of attention that takes in its mass."""
    queries, keys = arrays(16, length=2)
    before = mx.where(mx.arange(33) % 3 == 0, mx.nan, mx.ones((2, 2, 33)))
    given = {"scale": SCALE, "kind": "mass", "mask": "causal"}
    return partial(fast.attention_and_accumulate, queries, keys, keys, before, **given)


CALLS: dict[str, tuple[Callable[..., object], int]] = {
    "keep 39": (partial(fast.keep_indices, *rows_with_ties(6, 2, 40), keep=39, sink_size=3), 1),
    "keep all": (partial(fast.keep_indices, *rows_with_ties(6, 2, 40), keep=40), 0),
    "average": (partial(fast.prefill_scores, *arrays(16), scale=SCALE, mask="causal"), 0),
    "mass": (partial(fast.prefill_scores, *arrays(16), scale=SCALE, kind="mass"), 0),
    "append": (appending(), 1),
    "step": (stepping(), 2),
}


def check_same(found: object, expected: object) -> None:
    for one, other in zip(arrays_of(found), arrays_of(expected), strict=True):
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
    assert compiled.cache_info().currsize == kernels


@pytest.mark.parametrize("given", ["nothing", "mask", "bias", "sinks"])
def test_a_step_like_one_before_is_no_request(
    given: str, gpu: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu()
    requests, made = [], backend.attention_request

    def request(*rows: Any, **told: Any) -> Any:
        requests.append(rows)
        return made(*rows, **told)

    monkeypatch.setattr(backend, "attention_request", request)
    for rows in (33, 34, 40, launch.TWO_PASS_KEYS + 1):
        key, shown = mx.random.key(rows), mx.arange(rows) % 5 > 0
        keys, values = mx.random.normal((2, 2, 2, rows, 64), key=key)
        mass = mx.where(mx.arange(2000) < rows - 3, mx.ones((2, 2, 2000)), mx.nan)
        more: dict[str, Any] = {
            "nothing": {}, "mask": {"mask": mx.array([[[[True]]], [[[False]]]]) & shown},
            "bias": {"row_bias": mx.abs(mx.random.normal(mass.shape, key=key))},
            "sinks": {"sinks": mx.ones(4)},
        }[given]  # fmt: skip
        found = []
        for name in ("metal", "composed"):
            with use_backend(name):
                step, queries = resolve().attention_and_accumulate, mx.ones((2, 4, 1, 64))
                for scale in (SCALE, 2 * SCALE):
                    found.append(step(queries, keys, values, mass, scale=scale, decay=None, **more))
        check_same(found[0], found[2])
        check_same(found[1], found[3])
    assert len(requests) == 4  # two scales, in one pass and in two


@pytest.mark.parametrize("causal", [False, True])
def test_rows_are_unpacked_where_that_is_faster(
    causal: bool, gpu: Callable[[], PipelineLimit], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = gpu().calls
    request = Case(bits=(8, 4), scores=False, lse=False, queries=3, heads=(4, 2)).request()
    request.causal = causal
    expected = EmulatorBackend().attend(request)
    for margin, more in ((0.0, 0), (math.inf, 1)):
        monkeypatch.setattr(mlx_attention, "MARGIN", margin)
        monkeypatch.setattr(metal.BACKEND, "_measured", {})
        assert metal.BACKEND.uses_mlx(request) is (margin == 0)
        before = len(launched)
        check_same(metal.BACKEND.attend(request).out, expected.out)
        assert len(launched) == before + more


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("asked", ["scores", "lse", "skipped", "mask", "bias", "sparse", "codes"])
def test_mlx_does_not_serve_where_more_is_asked_for(
    asked: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"bits": (8, 8), "scores": False, "lse": False, "queries": queries}
    changed: dict[str, Any] = {
        "mask": {"mask": "bool" if queries == 1 else "add-f32"}, "sparse": {"sparse": 1e-3},
        "codes": {"bits": (), "kv_format": "turbo3"}, "skipped": {"sparse": 1e-3, "skipped": True},
    }  # fmt: skip
    assert mlx_attention.serves(Case(**plain).request())
    assert not mlx_attention.serves(Case(**plain | changed.get(asked, {asked: True})).request())
    monkeypatch.setattr(mlx_attention, "NUMBERS", ("scale",))  # a new number, and not 0
    assert not mlx_attention.serves(Case(**plain).request())


@pytest.mark.parametrize("case", CHUNKS, ids=str)
def test_mlx_serves_a_chunk(case: Case, gpu: Callable[[], Any]) -> None:
    launched, request = gpu().calls, case.request()
    request.bias_masks = False
    if request.row_bias is not None:
        request.row_bias = mx.maximum(request.row_bias, -9)
    assert not metal.BACKEND.refuses(request)
    check_chunk(request, metal.BACKEND.attend)
    assert not launched


@pytest.mark.parametrize("backend", [metal.BACKEND, cuda.BACKEND], ids=["metal", "cuda"])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "step"])  # not refused
def test_on_a_cpu_stream_the_composition_serves(
    name: str, backend: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "unavailable_reason", lambda: "")
    results = []
    for each in (backend.name, "composed"):
        with use_backend(each):
            results.append(CALLS[name][0](stream=mx.cpu))
    check_same(*results)
