"""benchmarks/sparse_v.py: what counts as skipped, and what its committed result promises."""

import json

import numpy as np
import pytest

from emulator.backend import EmulatorBackend
from emulator.build import compiler
from emulator.kernel import Run
from mlx_h2o.operations.gpu import launch
from mlx_h2o.operations.requests import attention_request
from paths import BENCHMARKS

SCRIPT = "sparse_v"


def test_a_row_that_one_head_needs_is_not_skipped(benchmark):
    pairs = np.array([[True, True, False], [True, False, False]]).reshape(1, 2, 1, 3)
    assert benchmark.rows_of(pairs, 1).tolist() == [[[True, False, False]]]
    assert benchmark.rows_of(pairs, 2).tolist() == pairs[:, :, 0].tolist()


def test_an_ablation_keeps_its_bounds(benchmark):
    found = benchmark.ablation(list(benchmark.synthetic_samples(200, 4.0, 2)), 8)
    assert [each["threshold"] for each in found["thresholds"]] == list(benchmark.THRESHOLDS)
    for each in found["thresholds"]:
        assert each["worst_dropped_mass"] <= each["bound_of_dropped_mass"]
        # Relative to the largest value, with the rounding of float32.
        assert each["worst_error"] <= each["worst_dropped_mass"] + 1e-6
        assert each["rows_skipped_exact"] <= each["pairs_below"]
    assert found["thresholds"][0]["pairs_below"] > found["thresholds"][-1]["pairs_below"] > 0


@pytest.mark.exhaustive
@pytest.mark.emulator
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler found (g++ or clang++)")
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_emulated_kernel_reads_what_the_rule_leaves(benchmark, blocks):
    """In one launch for the two sweeps, and in one for each: the bytes of values that are read, and
    the share of pairs that is reported."""
    (sample,) = benchmark.synthetic_samples(200, 6.0, 1)
    packed = sample.packed(8)
    _, scores, lse = benchmark.attention(sample, packed, 8, 0.0)
    simdgroups = launch.preferred_simdgroups(128, 128)
    shares = []
    for threshold in benchmark.THRESHOLDS:
        request = attention_request(
            sample.queries, tuple(packed[:3]), tuple(packed[3:]), scale=sample.scale, bits=8,
            group_size=benchmark.GROUP_SIZE, sparse_v_threshold=threshold, return_skipped=True,
        )  # fmt: skip
        run = Run(reads={})
        backend = EmulatorBackend(run, simdgroups=simdgroups, blocks=blocks)
        reported = backend.attend(request)[3].mean().item()
        pairs = np.exp(scores - lse[..., None]) < threshold
        rows = benchmark.rows_of(pairs, 2)
        read = run.reads["value_words"] / packed[3].nbytes
        # float32 may decide otherwise for a row that meets the threshold to the last digits.
        assert abs(1 - read - rows.mean()) <= 1 / rows.size + 1e-6
        assert abs(reported - pairs.mean()) <= 1 / rows.size + 1e-6
        shares.append(rows.mean())
    assert max(shares) > 0.01


def test_the_committed_result_supports_the_default():
    """1e-6, the value that the documentation gives, errs a tenth of what packing does, at most."""
    result = json.loads((BENCHMARKS / "results" / "sparse_v.json").read_text())
    assert {"machine", "mlx", "mlx_h2o"} <= result["environment"].keys()
    for source in result["sources"]:
        at_default = next(each for each in source["thresholds"] if each["threshold"] == 1e-6)
        assert at_default["worst_error"] < source["worst_error_of_packing"] / 10
