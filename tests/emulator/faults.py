"""Faults put into the Metal text on purpose, by name; docs/kernels.md lists them.

A fault is one replacement in the packaged text, which must change it; ``caught`` says how it
shows: words of the emulator's error, or WRONG where only the numbers do, in at least one schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from emulator.backend import EmulatorBackend
from emulator.cases import Case
from emulator.kernel import Run

WRONG = "differs from the reference"
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
SPARSE = Case(
    rows=200, heads=(4, 2), bits=(8, 8), sparse=5e-3, mask="bool", simdgroups=2, skipped=True
)
SPARSE_BLOCKS = replace(SPARSE, blocks=3)
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
    "rows skipped that count": Fault("share < least", "share < 2.0f * least", WRONG, case=SPARSE),
    "rows read that do not count": Fault(
        "        own_weight = 0.0f;\n", "", WRONG, case=replace(SPARSE, skipped=False)
    ),
    "skipped rows that are not in the denominator": Fault(
        "      h2o_softmax_count(state, score);\n",
        "      if (score > 0.0f) {\n        h2o_softmax_count(state, score);\n      }\n",
        WRONG,
        case=SPARSE,
    ),
    "a denominator of logits that is not faded": Fault(
        "state.total = state.total * fade + metal::fast",
        "state.total = state.total * (fade > 0.0f ? 1.0f : 0.0f) + metal::fast",
        WRONG,
        in_header=True,
        case=SPARSE,
    ),
    "every lane weighs the same key": Fault(
        "scores[row * key_count + own_key]", "scores[row * key_count + start]", WRONG, case=SPARSE
    ),
    "logits read past the last one": Fault(
        "own_key < key_count ?", "own_key <= key_count ?", "memory fault", case=SPARSE
    ),
    "the value row of another lane's key": Fault(
        "i = start; from", "i = start + key_step; from", WRONG, case=SPARSE
    ),
    "weights read before they are there": Fault(
        "  metal::threadgroup_barrier(metal::mem_flags::mem_device | "
        "metal::mem_flags::mem_threadgroup);\n",
        "",
        WRONG,
        case=SPARSE,
    ),
    "masked rows counted as skipped": Fault(
        "!(score <= H2O_LOWEST)", "score == score", WRONG, case=SPARSE
    ),
    "skipped rows of one lane": Fault("metal::simd_sum(count)", "count", WRONG, case=SPARSE),
    "skipped rows of one simdgroup": Fault(
        "has_part ? counts[lane]", "lane == 0 ? counts[lane]", WRONG, case=SPARSE
    ),
    "weights of a block compared with those of all": Fault(
        "own_weight * share < least",
        "own_weight * (share > 0.0f ? 1.0f : 0.0f) < least",
        WRONG,
        case=SPARSE_BLOCKS,
    ),
    "weights of a block under another's maximum": Fault(
        "metal::simd_shuffle(part.maximum, ushort(block))",
        "metal::simd_shuffle(part.maximum, ushort((block + 1) % blocks))",
        WRONG,
        case=SPARSE_BLOCKS,
    ),
    "the denominator of one block": Fault(
        "params[2] * merged.total",
        "params[2] * metal::simd_shuffle(part.total, ushort(block))",
        WRONG,
        case=SPARSE_BLOCKS,
    ),
    "skipped rows of one block": Fault(
        "metal::simd_sum(lane < blocks ? partial_skipped",
        "metal::simd_sum(lane < 1 ? partial_skipped",
        WRONG,
        case=SPARSE_BLOCKS,
    ),
    "blocks whose sweeps see different keys": Fault(
        "const int key_step = blocks * NS;\n  float sums",
        "const int key_step = (blocks + 1) * NS;\n  float sums",
        WRONG,
        case=SPARSE_BLOCKS,
    ),
}
