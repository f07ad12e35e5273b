"""Bytes of the inputs that the kernels read, counted by the emulator: each byte once per launch."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import reference
from emulator import EmulatorBackend, Run
from emulator.cases import Case, dequantized
from emulator.marks import EMULATED
from emulator.row_cases import same_bits
from mlx_h2o.operations.requests import AttentionRequest

pytestmark = EMULATED

PASSES = pytest.mark.parametrize("blocks", [None, 2], ids=["one pass", "two passes"])
DENSE = Case(dtype="f16", sizes=(128, 128), heads=(4, 2), rows=40, slack=3)


def reads(request: AttentionRequest, blocks: int | None, simdgroups: int = 4) -> dict[str, int]:
    """Bytes read of each input."""
    run = Run(reads={})
    counting = EmulatorBackend(run, simdgroups=simdgroups, blocks=blocks)
    plain = replace(counting, run=Run())
    assert all(map(same_bits, counting.attend(request), plain.attend(request)))
    return run.reads


def of_rows(found: dict[str, int]) -> int:
    """Bytes read of keys and values, however they are stored."""
    return sum(count for name, count in found.items() if name.startswith(("key", "value")))


def in_widest_gap(weights: np.ndarray, low: float, high: float) -> float:
    """A threshold of about low to high that no weight is near: a kernel's may round apart."""
    near = np.unique(weights[(weights > low) & (weights < high)])
    at = np.diff(near).argmax()
    assert near[at + 1] / near[at] > 1 + 1e-3
    return float(near[at : at + 2].mean())


@pytest.mark.slow
@PASSES
def test_dense_rows_are_read_once_and_the_slack_never(blocks: int | None) -> None:
    found = reads(DENSE.request(), blocks)
    assert found["keys"] == found["values"] == 2 * 40 * 128 * 2
    assert found["queries"] == 4 * 128 * 2 and found["params"] == 4
    if blocks:
        assert found["partial_sums"] == 4 * blocks * 128 * 4
        assert found["partial_maxima"] == found["partial_totals"] == 4 * blocks * 4


@pytest.mark.slow
@pytest.mark.matrix(3)
@PASSES
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_rows_save_what_they_promise(bits: int, group: int, blocks: int | None) -> None:
    """(bits + 32 / group) / 16 of dense float16: the bits, and a float16 scale and bias."""
    packed = replace(DENSE, bits=(bits, bits), group=group)
    share = (bits + 32 / group) / 16
    dense = of_rows(reads(DENSE.request(), blocks))
    found = of_rows(reads(packed.request(), blocks))
    assert found == share * dense


@pytest.mark.slow
@PASSES
def test_masked_rows_cost_nothing(blocks: int | None) -> None:
    visible = mx.arange(40) % 4 == 0
    request = replace(DENSE.request(), mask=mx.broadcast_to(visible, (1, 4, 1, 40)))
    found = reads(request, blocks)
    assert found["keys"] == found["values"] == 2 * 10 * 128 * 2
    assert found["mask"] == 40  # the heads share it


@pytest.mark.slow
@pytest.mark.matrix(2)
@PASSES
@pytest.mark.parametrize("scores", [False, True], ids=["logits for itself", "scores"])
@pytest.mark.parametrize("mask", ["", "bool"])
def test_sparse_v_reads_values_at_or_above_the_threshold_exactly(
    mask: str, scores: bool, blocks: int | None
) -> None:
    """A row is read where one query of one head of its group needs it, and only there."""
    request = Case(
        sizes=(128, 64), heads=(4, 2), queries=2, rows=150, bits=(8, 8), mask=mask, slack=1,
        scores=scores,
    ).request()  # fmt: skip
    dense = (request.queries, dequantized(request, "keys"), dequantized(request, "values"))
    expected = reference.attention(*dense, scale=request.scale, mask=request.mask)
    with np.errstate(invalid="ignore"):
        weights = np.exp(expected.scores - expected.lse[..., None])
    weights = np.where(expected.scores == -np.inf, 0.0, weights)
    threshold = in_widest_gap(weights, 0.009, 0.011)
    needed = (weights >= threshold).reshape(1, 2, 4, 150).any(2).sum()
    assert 0.1 < needed / 300 < 0.9
    found = reads(replace(request, sparse_v_threshold=threshold), blocks)
    assert found["value_words"] == needed * 64
    assert found["value_scales"] == found["value_biases"] == needed * 4
    if not mask:
        assert found["key_words"] == 300 * 128
    # The sweep over the values of several blocks reads the logits as an input.
    assert found.get("scores", 0) == (4 * 2 * 150 * 4 if blocks else 0)


@pytest.mark.slow
def test_outputs_cost_no_reads() -> None:
    assert reads(DENSE.request(), None) == reads(
        replace(DENSE.request(), return_scores=False, return_lse=False), None
    )
