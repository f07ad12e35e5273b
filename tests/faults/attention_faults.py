"""Faults in the Metal text of decode attention, by name.

``caught`` says how a fault shows: words of the emulator's error, or WRONG where only the numbers
do, in at least one order of the threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from emulator.cases import Case
from faults.metal import BARRIER
from faults.text import Edit

WRONG = "differs from the reference"


@dataclass(frozen=True)
class Fault(Edit):
    """An edit, how it shows, and the call that shows it."""

    caught: str = WRONG
    case: Case = Case(heads=(4, 2), queries=2, rows=70, mask="causal", slack=2)  # noqa: RUF009


MASKED = Case(heads=(4, 2), queries=2, rows=40, mask="add-f32", sinks="f32")
BIASED = Case(heads=(4, 2), queries=2, rows=40, mask="bool", bias=True)
PACKED = Case(heads=(4, 2), queries=2, rows=40, sizes=(96, 192), bits=(3, 6), group=32)
CODES = Case(heads=(4, 2), queries=2, rows=40, sizes=(128, 64), kv_format="turbo2v3")
TWO_PASS = replace(MASKED, blocks=3, simdgroups=2)

FAULTS = {
    # Threads that do not wait for each other.
    "no barrier before the partial maxima are read": Fault("sdpa_vector", BARRIER, "", at=1),
    "no barrier before a column is read": Fault("sdpa_vector", BARRIER, "", at=2),
    "no barrier before a column is written again": Fault("sdpa_vector", BARRIER, "", at=3),
    # Threads that do not meet.
    "a collective that only some lanes reach": Fault(
        "sdpa_vector",
        "metal::simd_sum(h2o_dot<KEY_PART>(query, key));",
        "lane < 7 ? metal::simd_sum(h2o_dot<KEY_PART>(query, key)) : 0.0f;",
        caught="divergence",
    ),
    "lanes in two different collectives": Fault(
        "sdpa_vector",
        "metal::simd_sum(column_part);",
        # A collective is known by its line.
        "lane < 7 ? metal::simd_sum(column_part)\n : metal::simd_sum(column_part);",
        caught="different collectives",
    ),
    "a barrier that only some simdgroups reach": Fault(
        "sdpa_vector", BARRIER, "if (group < 5) { " + BARRIER + " }", at=1, caught="divergence"
    ),
    "simdgroups that return before a barrier": Fault(
        "sdpa_vector",
        "const int64_t row =",
        "if (group > 3) { return; } const int64_t row =",
        caught="deadlock",
    ),
    # Memory.
    "scores written one row too far": Fault(
        "sdpa_vector",
        "scores[row * key_count + i]",
        "scores[(row + 1) * key_count + i]",
        at=2,
        caught="memory fault",
    ),
    "the last output written past its end": Fault(
        "sdpa_vector",
        "out[row * V + column * VALUE_PART + j]",
        "out[row * V + column * VALUE_PART + j + 2]",
        caught="memory fault",
    ),
    "the first output written before its start": Fault(
        "sdpa_vector",
        "out[row * V + column * VALUE_PART + j]",
        "out[row * V + column * VALUE_PART + j - 2]",
        caught="wrote outside",
    ),
    "keys read past the last one": Fault(
        "sdpa_vector",
        "i < key_count; i += key_step",
        "i <= key_count; i += key_step",
        caught="memory fault",
    ),
    "a threadgroup array written past its end": Fault(
        "sdpa_vector",
        "tile[group * (LANES + 1) + lane] =",
        "tile[group * (LANES + 1) + lane + 8] =",
        caught="past the end",
    ),
    "threadgroup memory read before it is written": Fault(
        "sdpa_vector", "totals[group] = state.total;", ""
    ),
    "a local read before it is written": Fault(
        "h2o_load", "for (int j = 0; j < E; j++)", "for (int j = 1; j < E; j++)", at=1
    ),
    "more than 32 KiB of threadgroup memory": Fault(
        "sdpa_vector",
        "H2O_THREADGROUP(float, tile, NS * (LANES + 1))",
        "H2O_THREADGROUP(float, tile, 8 * NS * (LANES + 1))",
        caught="the limit is 32768",
    ),
    # Arithmetic.
    "no scale": Fault("sdpa_vector", "query[j] *= params[0];", "query[j] *= 1.0f;"),
    "causal, one key too many": Fault("sdpa_vector", "query_index + 1 :", "query_index + 2 :"),
    "heads interleaved over key heads": Fault(
        "sdpa_vector", "head / (heads / kv_heads)", "head % kv_heads"
    ),
    "heads of a sliced cache taken for neighbours": Fault(
        "sdpa_vector",
        "h2o_offset(keys_strides, batch, kv_head, 0, lane * KEY_PART)",
        "(int64_t(batch) * kv_heads + kv_head) * key_count * D + lane * KEY_PART",
    ),
    "a sink in every simdgroup": Fault("sdpa_vector", "if (first_key == 0) {", "{", case=MASKED),
    "a finite bias that masks, added": Fault(
        "sdpa_vector", "bias <= params[1]", "bias == H2O_NEGATIVE_INFINITY", case=MASKED
    ),
    "NaN of the mask hidden by a comparison": Fault(
        "h2o_softmax_mean",
        "total == 0.0f ? 0.0f : sum / total",
        "total > 0.0f ? sum / total : 0.0f",
        case=MASKED,
    ),
    "maxima that start at minus infinity": Fault(
        "h2o_softmax_empty",
        "state.maximum = H2O_LOWEST;",
        "state.maximum = H2O_NEGATIVE_INFINITY;",
        case=MASKED,
    ),
    "sums that are not faded": Fault("h2o_softmax_weigh", "sums[j] *= fade;", "sums[j] *= 1.0f;"),
    # A bias of rows.
    "a bias of rows left out": Fault("sdpa_vector", "score += own_bias;", "", case=BIASED),
    "a bias that masks its row, added": Fault(
        "sdpa_vector", "own_bias <= H2O_LOWEST", "own_bias == H2O_NEGATIVE_INFINITY", case=BIASED
    ),
    "NaN of a bias left to the fast exp": Fault(
        "sdpa_vector", "state.total += own_bias - own_bias;", "", case=BIASED
    ),
    "a bias of query heads": Fault(
        "sdpa_vector",
        "kv_head * row_bias_strides[1]",
        "head * row_bias_strides[1]",
        caught="memory fault",
        case=BIASED,
    ),
    # Two passes.
    "blocks that take each other's keys": Fault(
        "sdpa_vector_2pass_1", "key_step = blocks * NS", "key_step = NS", case=TWO_PASS
    ),
    "a sink in every block": Fault(
        "sdpa_vector_2pass_1", "if (first_key == 0)", "if (group == 0)", case=TWO_PASS
    ),
    "sums of blocks that do not count by their share": Fault(
        "sdpa_vector_2pass_2",
        "sum += share * partial_sums",
        "sum += (share > 0.0f ? 1.0f : 0.0f) * partial_sums",
        case=TWO_PASS,
    ),
    "a block merged under another's share": Fault(
        "sdpa_vector_2pass_2",
        "metal::simd_shuffle(merged.share, ushort(b))",
        "metal::simd_shuffle(merged.share, ushort((b + 1) % blocks))",
        case=TWO_PASS,
    ),
    "columns of a block mixed up": Fault(
        "sdpa_vector_2pass_2",
        "% PARTS * LANES + lane",
        "% PARTS + lane * PARTS + 1",
        caught="memory fault",
        case=TWO_PASS,
    ),
    "partial sums of one block too far": Fault(
        "sdpa_vector_2pass_1",
        "partial_sums[(row * blocks + block) * V",
        "partial_sums[(row * blocks + block + 1) * V",
        caught="memory fault",
        case=TWO_PASS,
    ),
    "maxima of a block not written": Fault(
        "sdpa_vector_2pass_1",
        "partial_maxima[row * blocks + block] = merged.maximum;",
        "",
        case=TWO_PASS,
    ),
    "a lane without a block that brings poison": Fault(
        "sdpa_vector_2pass_2",
        "if (lane < blocks) {",
        "if (lane <= blocks) {",
        caught="memory fault",
        case=TWO_PASS,
    ),
    # Packed rows.
    "values unpacked with the bits of keys": Fault(
        "sdpa_vector", "<VALUE_PART, VB, G>", "<VALUE_PART, KB, G>", case=PACKED
    ),
    "keys unpacked with another group size": Fault(
        "sdpa_vector", "<KEY_PART, KB, G>", "<KEY_PART, KB, 2 * G>", case=PACKED
    ),
    "a lane's second group forgotten": Fault(
        "h2o_load_quantized", "j < near_count;", "j < near_count + GROUP;", case=PACKED
    ),
    "bits in the next word forgotten": Fault(
        "h2o_load_fields", "bits |= part[k + 1] << (32 - offset);", "bits |= 0u;", case=PACKED
    ),
    "a lane's part not shifted into place": Fault(
        "h2o_load_fields", "(part[k] >> shift) |", "part[k] |", case=PACKED
    ),
    "a word past the end of the row": Fault(
        "h2o_load_fields",
        "(first_bit + LENGTH - 1) / 32",
        "(first_bit + LENGTH) / 32",
        caught="memory fault",
        case=PACKED,
    ),
    "packed heads of a sliced cache taken for neighbours": Fault(
        "sdpa_vector",
        "h2o_offset(value_scales_strides, batch, kv_head, 0, 0)",
        "int64_t(batch * kv_heads + kv_head) * key_count * value_scales_strides[2]",
        case=replace(PACKED, slack=2),
    ),
    # Codes of rotated rows.
    "a row of codes without its norm": Fault(
        "h2o_load_codes", "norm * levels[fields[j]]", "levels[fields[j]]", case=CODES
    ),
    "codes of values looked up as those of keys": Fault(
        "sdpa_vector",
        "value_levels, value_scales[",
        "key_levels, value_scales[",
        caught="memory fault",
        case=CODES,
    ),
    "codes of values with the bits of keys": Fault(
        "sdpa_vector", "<VALUE_PART, VB>(", "<VALUE_PART, VB == 3 ? KB : VB>(", case=CODES
    ),
    "norms of a sliced cache taken for neighbours": Fault(
        "sdpa_vector",
        "key_scales[key_scales_start + i * key_scales_strides[2]]",
        "key_scales[0 * key_scales_start + (batch * kv_heads + kv_head) * key_count + i]",
        case=replace(CODES, slack=2),
    ),
}
