"""Faults in the Metal text of sparse V, by name."""

from __future__ import annotations

from dataclasses import replace

from emulator.cases import Case
from faults.attention_faults import Fault

SPARSE = Case(
    rows=200, heads=(4, 2), bits=(8, 8), sparse=5e-3, mask="bool", simdgroups=2, skipped=True
)
SPARSE_BLOCKS = replace(SPARSE, blocks=3)

FAULTS = {
    "rows skipped that count": Fault(
        "sdpa_vector_sparse", "share < least", "share < 2.0f * least", case=SPARSE
    ),
    "rows read that do not count": Fault(
        "sdpa_vector_sparse", "own_weight = 0.0f;", "", at=2, case=replace(SPARSE, skipped=False)
    ),
    "skipped rows that are not in the denominator": Fault(
        "sdpa_vector_sparse",
        "h2o_softmax_count(state, score);",
        "if (score > 0.0f) { h2o_softmax_count(state, score); }",
        case=SPARSE,
    ),
    "a denominator of logits that is not faded": Fault(
        "h2o_softmax_count",
        "state.total = state.total * fade + metal::fast",
        "state.total = state.total * (fade > 0.0f ? 1.0f : 0.0f) + metal::fast",
        case=SPARSE,
    ),
    "every lane weighs the same key": Fault(
        "sdpa_vector_sparse",
        "scores[row * key_count + own_key]",
        "scores[row * key_count + start]",
        case=SPARSE,
    ),
    "logits read past the last one": Fault(
        "sdpa_vector_sparse",
        "own_key < key_count ?",
        "own_key <= key_count ?",
        caught="memory fault",
        case=SPARSE,
    ),
    "the value row of another lane's key": Fault(
        "sdpa_vector_sparse", "i = start; from", "i = start + key_step; from", case=SPARSE
    ),
    "weights read before they are there": Fault(
        "sdpa_vector_sparse",
        "metal::threadgroup_barrier(metal::mem_flags::mem_device | ...);",
        "",
        case=SPARSE,
    ),
    "masked rows counted as skipped": Fault(
        "sdpa_vector_sparse", "!(score <= H2O_LOWEST)", "score == score", case=SPARSE
    ),
    "skipped rows of one lane": Fault(
        "sdpa_vector_sparse", "metal::simd_sum(count)", "count", case=SPARSE
    ),
    "skipped rows of one simdgroup": Fault(
        "sdpa_vector_sparse", "has_part ? counts[lane]", "lane == 0 ? counts[lane]", case=SPARSE
    ),
    "weights of a block compared with those of all": Fault(
        "sdpa_vector_sparse_values",
        "own_weight * share < least",
        "own_weight * (share > 0.0f ? 1.0f : 0.0f) < least",
        case=SPARSE_BLOCKS,
    ),
    "weights of a block under another's maximum": Fault(
        "sdpa_vector_sparse_values",
        "metal::simd_shuffle(part.maximum, ushort(block))",
        "metal::simd_shuffle(part.maximum, ushort((block + 1) % blocks))",
        case=SPARSE_BLOCKS,
    ),
    "the denominator of one block": Fault(
        "sdpa_vector_sparse_values",
        "params[2] * merged.total",
        "params[2] * metal::simd_shuffle(part.total, ushort(block))",
        case=SPARSE_BLOCKS,
    ),
    "skipped rows of one block": Fault(
        "sdpa_vector_2pass_2",
        "metal::simd_sum(lane < blocks ? partial_skipped",
        "metal::simd_sum(lane < 1 ? partial_skipped",
        case=SPARSE_BLOCKS,
    ),
    "blocks whose sweeps see different keys": Fault(
        "sdpa_vector_sparse_values",
        "key_step = blocks * NS",
        "key_step = (blocks + 1) * NS",
        case=SPARSE_BLOCKS,
    ),
}
