"""Faults put into the Metal text on purpose: the emulator and the reference catch each of them.

docs/kernels.md lists them. A fault is one replacement in the packaged text, which must change
it; ``caught`` says how it shows: words of the emulator's error, or WRONG where only the numbers
do, in at least one schedule.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from emulator import EmulatorBackend, KernelError, Run
from emulator.build import compiler
from emulator.cases import Case, compile_all, errors, probe_error
from mlx_h2o import kernels, launch
from mlx_h2o.backends import AttentionResult
from mlx_h2o.launch import AnyAttentionRequest

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(
        compiler() is None and os.environ.get("CI") != "true",
        reason="no C++ compiler found (g++ or clang++)",
    ),
]

WRONG = "differs from the reference"
SCHEDULES = (Run("forward"), Run("reverse"), Run("random", seed=3))
BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"


@dataclass(frozen=True)
class Fault:
    """Replace the ``at``-th ``old`` (from 1) by ``new``, in the body or the shared header."""

    old: str
    new: str
    caught: str
    at: int = 1
    in_header: bool = False
    case: Case = Case(heads=(4, 2), queries=2, rows=70, mask="causal", slack=2)  # noqa: RUF009

    def edit(self, text: str) -> str:
        """The text with the fault in it."""
        parts = text.split(self.old)
        assert len(parts) > self.at, f"{self.old!r} is not there {self.at} times"
        return self.old.join(parts[: self.at]) + self.new + self.old.join(parts[self.at :])

    def edit_where(self, text: str) -> str:
        """The text of a pass, with the fault if it belongs there."""
        return self.edit(text) if self.old in text else text

    def backend(self, run: Run) -> EmulatorBackend:
        """The emulator with the fault in the kernel."""
        place = "edit_header" if self.in_header else "edit_source"
        return replace(self.case.backend(run), **{place: self.edit_where})


MASKED = Case(heads=(4, 2), queries=2, rows=40, mask="add-f32", sinks="f32")

PROBED = Case(heads=(4, 2), queries=2, rows=40, mask="bool", probes=3)
PACKED = Case(heads=(4, 2), queries=2, rows=40, sizes=(96, 192), bits=(3, 6), group=32)
SPARSE = Case(rows=200, sizes=(64, 64), bits=(8, 8), sparse=1e-3, simdgroups=2)
TWO_PASS = replace(MASKED, blocks=3, simdgroups=2)

FAULTS = {
    # Threads that do not wait for each other.
    "no barrier before the partial maxima are read": Fault("  " + BARRIER, "", WRONG, at=1),
    "no barrier before a column is read": Fault("    " + BARRIER, "", WRONG, at=1),
    "no barrier before a column is written again": Fault("    " + BARRIER, "", WRONG, at=2),
    # Threads that do not meet.
    "a collective that only some lanes reach": Fault(
        "metal::simd_sum(h2o_dot<KEY_PART>(query, key));",
        "lane < 7 ? metal::simd_sum(h2o_dot<KEY_PART>(query, key)) : 0.0f;",
        "divergence",
    ),
    "lanes in two different collectives": Fault(
        "metal::simd_sum(column_part);",
        "lane < 7 ? metal::simd_sum(column_part) :\n    metal::simd_sum(column_part);",
        "different collectives",
    ),
    "a barrier that only some simdgroups reach": Fault(
        "  " + BARRIER, "  if (group < 5) {\n    " + BARRIER + "  }\n", "divergence"
    ),
    "simdgroups that return before a barrier": Fault(
        "  const int64_t row =", "  if (group > 3) { return; }\n  const int64_t row =", "deadlock"
    ),
    # Memory.
    "scores written one row too far": Fault(
        "scores[row * key_count + i]", "scores[(row + 1) * key_count + i]", "memory fault", at=2
    ),
    "the last output written past its end": Fault(
        "out[row * V + column * VALUE_PART + j]",
        "out[row * V + column * VALUE_PART + j + 2]",
        "memory fault",
    ),
    "the first output written before its start": Fault(
        "out[row * V + column * VALUE_PART + j]",
        "out[row * V + column * VALUE_PART + j - 2]",
        "wrote outside",
    ),
    "keys read past the last one": Fault(
        "i < key_count; i += key_step", "i <= key_count; i += key_step", "memory fault"
    ),
    "a threadgroup array written past its end": Fault(
        "tile[group * (LANES + 1) + lane] =",
        "tile[group * (LANES + 1) + lane + 8] =",
        "past the end",
    ),
    "threadgroup memory read before it is written": Fault(
        "    totals[group] = state.total;\n", "", WRONG
    ),
    "a local read before it is written": Fault(
        "for (int j = 0; j < E; j++)", "for (int j = 1; j < E; j++)", WRONG, in_header=True
    ),
    "more than 32 KiB of threadgroup memory": Fault(
        "H2O_THREADGROUP(float, tile, NS * (LANES + 1))",
        "H2O_THREADGROUP(float, tile, 8 * NS * (LANES + 1))",
        "the limit is 32768",
    ),
    # Arithmetic.
    "no scale": Fault("query[j] *= params[0];", "query[j] *= 1.0f;", WRONG),
    "causal, one key too many": Fault("query_index + 1 :", "query_index + 2 :", WRONG),
    "heads interleaved over key heads": Fault(
        "head / (heads / kv_heads)", "head % kv_heads", WRONG
    ),
    "heads of a sliced cache taken for neighbours": Fault(
        "h2o_offset(keys_strides, batch, kv_head, 0, lane * KEY_PART)",
        "(int64_t(batch) * kv_heads + kv_head) * key_count * D + lane * KEY_PART",
        WRONG,
    ),
    "a sink in every simdgroup": Fault("if (first_key == 0) {", "{", WRONG, case=MASKED),
    "a finite bias that masks, added": Fault(
        "bias <= params[1]", "bias == H2O_NEGATIVE_INFINITY", WRONG, case=MASKED
    ),
    "NaN of the mask hidden by a comparison": Fault(
        "total == 0.0f ? 0.0f : sum / total",
        "total > 0.0f ? sum / total : 0.0f",
        WRONG,
        in_header=True,
        case=MASKED,
    ),
    "maxima that start at minus infinity": Fault(
        "state.maximum = H2O_LOWEST;",
        "state.maximum = H2O_NEGATIVE_INFINITY;",
        WRONG,
        in_header=True,
        case=MASKED,
    ),
    "sums that are not faded": Fault("sums[j] *= fade;", "sums[j] *= 1.0f;", WRONG, in_header=True),
    # Two passes.
    "blocks that take each other's keys": Fault(
        "key_step = blocks * NS", "key_step = NS", WRONG, case=TWO_PASS
    ),
    "a sink in every block": Fault("if (first_key == 0)", "if (group == 0)", WRONG, case=TWO_PASS),
    "sums of blocks that do not count by their share": Fault(
        "sum += share * partial_sums",
        "sum += (share > 0.0f ? 1.0f : 0.0f) * partial_sums",
        WRONG,
        case=TWO_PASS,
    ),
    "a block merged under another's share": Fault(
        "metal::simd_shuffle(merged.share, ushort(b))",
        "metal::simd_shuffle(merged.share, ushort((b + 1) % blocks))",
        WRONG,
        case=TWO_PASS,
    ),
    "columns of a block mixed up": Fault(
        "% PARTS * LANES + lane", "% PARTS + lane * PARTS + 1", "memory fault", case=TWO_PASS
    ),
    "partial sums of one block too far": Fault(
        "partial_sums[(row * blocks + block) * V",
        "partial_sums[(row * blocks + block + 1) * V",
        "memory fault",
        case=TWO_PASS,
    ),
    "maxima of a block not written": Fault(
        "    partial_maxima[row * blocks + block] = merged.maximum;\n", "", WRONG, case=TWO_PASS
    ),
    "a lane without a block that brings poison": Fault(
        "if (lane < blocks) {", "if (lane <= blocks) {", "memory fault", case=TWO_PASS
    ),
    # Packed rows.
    "values unpacked with the bits of keys": Fault(
        "<VALUE_PART, VB, G>", "<VALUE_PART, KB, G>", WRONG, case=PACKED
    ),
    "keys unpacked with another group size": Fault(
        "<KEY_PART, KB, G>", "<KEY_PART, KB, 2 * G>", WRONG, case=PACKED
    ),
    "a lane's second group forgotten": Fault(
        "j < near_count;", "j < near_count + GROUP;", WRONG, in_header=True, case=PACKED
    ),
    "bits in the next word forgotten": Fault(
        "bits |= part[k + 1] << (32 - offset);", "bits |= 0u;", WRONG, in_header=True, case=PACKED
    ),
    "a lane's part not shifted into place": Fault(
        "(part[k] >> shift) |", "part[k] |", WRONG, in_header=True, case=PACKED
    ),
    "a word past the end of the row": Fault(
        "(first_bit + LENGTH - 1) / 32",
        "(first_bit + LENGTH) / 32",
        "memory fault",
        in_header=True,
        case=PACKED,
    ),
    "packed heads of a sliced cache taken for neighbours": Fault(
        "h2o_offset(value_scales_strides, batch, kv_head, 0, 0)",
        "int64_t(batch * kv_heads + kv_head) * key_count * value_scales_strides[2]",
        WRONG,
        case=replace(PACKED, slack=2),
    ),
    # Probes.
    "probes of masked rows left out": Fault(
        "if (visible || serves_probes) {", "if (visible) {", WRONG, case=PROBED
    ),
    "masked rows that the probes let in": Fault(
        "      if (!visible) {\n        continue;\n      }\n", "", WRONG, case=PROBED
    ),
    "probes of another KV head": Fault(
        "h2o_offset(probes_strides, batch, kv_head, 0,",
        "h2o_offset(probes_strides, batch, 0, 0,",
        WRONG,
        case=PROBED,
    ),
    "probes without the scale": Fault(
        "params[0] * metal::simd_sum",
        "metal::simd_sum",
        WRONG,
        case=PROBED,
    ),
    "scores of a probe one row too far": Fault(
        "(probe_row + e) * key_count",
        "(probe_row + e + 1) * key_count",
        "memory fault",
        case=PROBED,
    ),
    # Sparse V.
    "rows skipped that count": Fault(
        "weight < params[2] * state.total",
        "weight < 99.0f * params[2] * state.total",
        WRONG,
        case=SPARSE,
    ),
    "skipped rows that leave the denominator": Fault(
        "        continue;\n",
        "        state.total -= weight;\n        continue;\n",
        WRONG,
        case=SPARSE,
    ),
}


@cache
def request_for(case: Case) -> AnyAttentionRequest:
    """The call that a fault is shown on; a masked one has all the corners of masks in it."""
    request = case.request()
    if case.mask != "add-f32":
        return request
    mask = np.array(request.mask)
    mask[0, 1, 0, 3:6] = np.finfo(np.float32).min
    mask[0, 2, 1, 7] = np.nan
    # The first head has neither keys nor a sink.
    sinks = np.array(request.sinks)
    sinks[0] = -np.inf
    return replace(request, mask=mx.array(mask), sinks=mx.array(sinks))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_all((fault.backend(Run()), request_for(fault.case)) for fault in FAULTS.values())


def outcome(backend: EmulatorBackend, request: AnyAttentionRequest) -> tuple[AttentionResult, bool]:
    """The result, and whether the scores of the probes are wrong."""
    if request.probes is None:
        return backend.attention(request), False
    result, found = backend.attention_with_probes(request)
    return result, probe_error(request, found) > 1


def symptoms(fault: Fault | Case, request: AnyAttentionRequest) -> list[str]:
    """What is wrong with the kernel, one line for each schedule that shows it."""
    found = []
    for run in SCHEDULES:
        try:
            result, wrong = outcome(fault.backend(run), request)
        except KernelError as error:
            found.append(str(error))
        else:
            if wrong or max(errors(request, result).values()) > 1:
                found.append(WRONG)
    return found


@pytest.mark.parametrize("case", [Fault.case, MASKED, TWO_PASS, PACKED, SPARSE, PROBED], ids=str)
def test_the_kernel_without_a_fault_passes(case: Case) -> None:
    assert symptoms(case, request_for(case)) == []


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    fault = FAULTS[name]
    request = request_for(fault.case)
    passes = launch.plan(request, fault.case.simdgroups, fault.case.blocks).passes
    clean = [kernels.HEADER] if fault.in_header else [each.kernel.source for each in passes]
    changed = [text for text in clean if fault.old in text]
    assert len(changed) == 1 and fault.edit(changed[0]) != changed[0]
    found = symptoms(fault, request)
    assert any(fault.caught in symptom for symptom in found), found
