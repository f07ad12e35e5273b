"""Probes: queries that are scored in the same read of the keys, run by the emulator."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import pytest

import mlx_h2o
from emulator import EmulatorBackend, Run
from emulator.build import compiler
from emulator.cases import Case, errors, probe_error
from mlx_h2o.operations import metal
from mlx_h2o.operations.backends import register
from test_emulator import PipelineLimit, same_bits

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(
        compiler() is None and os.environ.get("CI") != "true",
        reason="no C++ compiler found (g++ or clang++)",
    ),
]


def _cases() -> Iterator[Case]:
    for blocks in (None, 3):
        for bits in (None, (8, 4)):
            for mask in ("", "causal", "bool", "add-f32"):
                yield Case(
                    mask=mask, blocks=blocks, bits=bits, probes=2, queries=2, heads=(4, 2),
                    rows=40, batch=2, simdgroups=4, slack=2,
                )  # fmt: skip
    for probes in (1, 5):
        yield Case(dtype="f16", sizes=(128, 128), probes=probes, heads=(8, 2), mask="causal")
    yield Case(dtype="bf16", sizes=(192, 128), probes=1, heads=(3, 3), scores=False)
    yield Case(sizes=(96, 64), bits=(6, 3), group=32, probes=1, sparse=1e-2)


CASES = list(_cases())


@pytest.mark.slow
@pytest.mark.matrix(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_probes_are_scored_and_change_nothing_else(case: Case) -> None:
    request, backend = case.request(), case.backend()
    result = backend.attention(request)
    scores = result.probe_scores
    assert scores.shape == (case.batch, case.heads[1], case.probes, case.rows)
    assert probe_error(request, scores) <= 1
    without = backend.attention(replace(request, probes=None))
    assert all(map(same_bits, result[:4], without))
    for run in (Run("reverse"), Run("random", seed=1), Run("random", seed=2)):
        assert all(map(same_bits, result, replace(backend, run=run).attention(request))), run


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("bits", [None, (8, 8)], ids=["dense", "packed"])
@pytest.mark.parametrize("blocks", [None, 2], ids=["one pass", "two passes"])
def test_keys_are_read_once(bits: tuple[int, int] | None, blocks: int | None) -> None:
    case = Case(dtype="f16", bits=bits, blocks=blocks, simdgroups=4, probes=3, heads=(4, 2))
    request = case.request()
    reads, without = {}, {}
    case.backend(Run(reads=reads)).attention(request)
    case.backend(Run(reads=without)).attention(replace(request, probes=None))
    assert reads.pop("probes") == 2 * 3 * 64 * 2
    assert reads == without


def test_values_of_masked_rows_are_not_read() -> None:
    request = Case(mask="bool", probes=1, heads=(2, 2)).request()
    masked = mx.logical_not(request.mask)[:, :, 0, :, None]
    poisoned = replace(request, values=mx.where(masked, math.nan, request.values))
    clean, found = (EmulatorBackend().attention(each) for each in (request, poisoned))
    assert all(map(same_bits, clean, found))


@pytest.mark.slow
def test_strided_probes() -> None:
    request = Case(probes=2, heads=(4, 2)).request()
    expected = EmulatorBackend().attention(request).probe_scores
    columns = mx.contiguous(request.probes.swapaxes(-1, -2)).swapaxes(-1, -2)
    found = EmulatorBackend().attention(replace(request, probes=columns)).probe_scores
    assert same_bits(expected, found)


@pytest.mark.slow
def test_serves_the_public_operation() -> None:
    request = Case(probes=2, heads=(4, 2), queries=2, mask="causal").request()
    remove = register("emulator", EmulatorBackend())
    try:
        with mlx_h2o.use_backend("emulator"):
            *result, scores = mlx_h2o.fast.scaled_dot_product_attention_with_probes(
                request.queries, request.keys, request.values, request.probes,
                scale=request.scale, mask="causal",
            )  # fmt: skip
    finally:
        remove()
    assert max(errors(request, tuple(result)).values()) <= 1
    assert probe_error(request, scores) <= 1


@pytest.mark.slow
def test_metal_back_end_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = PipelineLimit(512)
    monkeypatch.setattr(mx.fast, "metal_kernel", gpu)
    monkeypatch.setattr(metal, "_simdgroups", {})
    metal._metal_kernel.cache_clear()
    try:
        request = Case(rows=1030, bits=(8, 8), probes=1).request()
        result = metal.attention(request)
        assert max(errors(request, result).values()) <= 1
        assert probe_error(request, result.probe_scores) <= 1
        assert gpu.calls == [1024, 512, 32, 512, 32]
    finally:
        metal._metal_kernel.cache_clear()
