"""Faults in the native kernels, each of which the native test driver must catch.

Only the kernels that read the changed file are compiled again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from faults.driver import Fault, Toolchain
from made_once import made_once

COMPILER = os.environ.get("CXX") or next(
    filter(shutil.which, ("c++", "g++", "clang++")), "no compiler"
)
# The portable code alone: the same text for vectors takes the compiler four times as long.
TOOLS = Toolchain(
    COMPILER, flags=("-DMLX_H2O_SCALAR",), reached=r"(?!attention_(avx2|avx512|neon))\w+"
)

ATTENTION = {
    "a causal query sees one key too many": Fault(
        "visible_keys", "- a.query_count;", "- a.query_count + 1;", caught="score of target"
    ),
    "query heads are dealt to KV heads in turn": Fault(
        "query_head_of",
        "return piece.kv_head * group + ...;",
        "return piece.kv_head + a.kv_heads * (...) + 0 * group;",
        caught="of target",
    ),
    "the sink is left out of the denominator": Fault(
        "Total::Total", "total = std::exp(...);", "total = 0;", caught="lse of target"
    ),
    "an additive mask is compared below its threshold only": Fault(
        "mask_logits", "bias <= threshold", "bias < 2 * threshold", caught="of target"
    ),
    "a bias of rows is left out": Fault(
        "add_row_bias", "logits[i] + bias[i]", "logits[i]", caught="of target"
    ),
    "the lowest finite bias does not mask its row": Fault(
        "add_row_bias", "bias[i] <= kLowest", "bias[i] < kLowest", caught="score of target"
    ),
    "a masked pair meets the NaN of a bias": Fault(
        "add_row_bias", "|| logits[i] == -kInfinity", "", caught="of target"
    ),
    "all KV heads have the bias of the first": Fault(
        "add_row_bias",
        "kv_head * a.row_bias_strides[1]",
        "0 * kv_head * a.row_bias_strides[1]",
        caught="of target",
    ),
    "the last columns of a value are left out": Fault(
        "add_values",
        "d < width; d += kLanes) { add_tail",
        "d + kLanes <= width; d += kLanes) { add_tail",
        caught="out of target",
    ),
    "a later maximum does not rescale what was summed": Fault(
        "attend_span",
        "float factor = std::exp(before - now);",
        "float factor = before > now ? 0.0f : 1.0f;",
        caught="of target",
    ),
    "spans are added as if they had one maximum": Fault(
        "finish_row", "double relative = ...;", "double relative = 1;", caught="out of target"
    ),
    "half bytes are taken in the order of their words": Fault(
        "code_order",
        "return place % groups * 8 + place / groups;",
        "return place + 0 * groups;",
        caught="of target",
    ),
    "queries are not in the basis of the codes": Fault(
        "load_row", "rotate(a.key_packing.codes->signs, to);", "", caught="score of target"
    ),
    "outputs stay in the basis of the codes": Fault(
        "store_row", "restore(packing.codes->signs, sums);", "", caught="out of target"
    ),
    "codes count instead of standing for levels": Fault(
        "with_runs",
        "packing.codes != nullptr ? packing.codes->levels",
        "packing.codes != nullptr && packing.bits == 0 ? packing.codes->levels",
        caught="of target",
    ),
    "all groups of a row have the scale of the first": Fault(
        "unpack_row", "i / packing.group_size;", "i / packing.group_size * 0;", caught="of target"
    ),
    "a run has the scale of the row's first group": Fault(
        "PackedRows::load_run", "* kStep + row;", "* 0 + row;", caught="of target"
    ),
    "two groups of a row change scales": Fault(
        "widen_rows",
        "store(to + row, even); store(to + kStep + row, odd);",
        "store(to + row, odd); store(to + kStep + row, even);",
        caught="of target",
    ),
    "the second four keys of a tile are the first": Fault(
        "Cursor::row", "quads[row / 4]", "quads[row / 8]", caught="of target"
    ),
    "sparse V skips up to twice its threshold": Fault(
        "limits", "* total.total", "* 2 * total.total", caught="of target"
    ),
    "a masked pair counts as skipped": Fault(
        "WantedKeys::look_at",
        "std::popcount(seen & ~wanted)",
        "std::popcount((all & ~wanted) | (seen & 0))",
        caught="skipped of target",
    ),
    "a row has the weights that another row wants": Fault(
        "weigh_listed",
        "zero_below(x, broadcast(limit), exp_nonpositive(x))",
        "exp_nonpositive(x + zero_below(x, broadcast(limit), broadcast(0)))",
        caught="out of target",
    ),
    "wanted keys are used twice": Fault(
        "WantedKeys::drop", "keys_ + used,", "keys_ + 0 * used,", caught="out of target"
    ),
    "a listed row is that of its place": Fault(
        "RowBytes::gather",
        "first + keys[i] * stride,",
        "first + i * stride,",
        caught="out of target",
    ),
    "listed rows have the scales of the first": Fault(
        "with_listed_rows", "strides[2] = groups;", "strides[2] = 0;", caught="out of target"
    ),
    "wanted keys are taken for neighbours": Fault(
        "follow_each_other", "== count - 1;", "<= count;", caught="out of target"
    ),
}

ROWS = {
    "a tie keeps the higher position": Fault(
        "Rank", "order > other.order", "order < other.order", caught="keep_indices: N="
    ),
    "NaN ranks as the best score": Fault(
        "rank", "unscored(kNotANumber,", "unscored(kProtected,", caught="keep_indices: N="
    ),
    "the recent rows start one later": Fault(
        "rank", "position >= ", "position > ", caught="keep_indices: N="
    ),
    "the window of the first sequence is that of all": Fault(
        "", "a.zones_of(batch)", "a.zones_of(0)", caught="keep_indices: N="
    ),
    "a sink of a chunk is left out of the mass": Fault(
        "add_mass",
        "shift) + std::exp(...);",
        "shift);",
        caught="prefill mass of target",
    ),
    "what is not a whole vector has no weight": Fault(
        "weigh_row",
        "total += static_cast<double>(lanes[lane]);",
        "",
        caught="prefill mass of target",
    ),
    "a masked pair pulls the average towards zero": Fault(
        "averaged",
        "return mean.count > 0 ? ... : before;",
        "return ...;",
        caught="importance of target",
    ),
    "the first score is averaged with zero": Fault(
        "averaged", "result : score;", "result : decay.take * score;", caught="importance of target"
    ),
    "a query sees one key too many of a chunk": Fault(
        "score_rows", "newest + 1 - first", "newest + 2 - first", caught="prefill"
    ),
    "the parts of a mass are not added up": Fault(
        "mass", "result[key] += ", "result[key] = ", caught="prefill mass of target"
    ),
    "keys count by their length": Fault(
        "diversity_of_head",
        "add_scaled(key, result[row], ",
        "add_scaled(key, 1.0f, ",
        caught="key diversity of target",
    ),
    "a packed value loses its upper bits at the end of a word": Fault(
        "BitWriter::put", "pending_ >>= 32;", "pending_ = 0;", caught="quantised value of target"
    ),
    "a slot beyond the end is the first": Fault(
        "quantize_rows",
        "std::min(wanted, last)",
        "wanted > last ? 0 : wanted",
        caught="quantised value of target",
    ),
    "rows that follow each other begin at the first slot": Fault(
        "quantize_rows", "a.start + new_row", "new_row", caught="quantised value of target"
    ),
}

FOLDING = {
    "rows are folded into any that stays": Fault(
        "fold_head", "if (head.is_eligible(row)) ", "", caught="nearest of target"
    ),
    "a row without a rank is folded": Fault(
        "fold_head",
        "nearest[i] >= 0 && head.is_folded(going.slots[i])",
        "nearest[i] >= 0",
        caught="nearest of target",
    ),
    "rows weigh alike in a mean": Fault(
        "fold_rows",
        "const float weight = head.weight(going[i]);",
        "const float weight = 1;",
        caught="folded row of target",
    ),
    "a row that stands for several counts once": Fault(
        "fold_head",
        "count += std::exp(head.bias(going.slots[i]));",
        "count += 1;",
        caught="folded row of target",
    ),
    "masses do not add up": Fault(
        "fold_head", "mass += head.mass(going.slots[i]);", "", caught="folded row of target"
    ),
    "the last vector of a row is left out": Fault(
        "find_nearest",
        "d < width; d += kLanes",
        "d + 16 < width; d += kLanes",
        caught="nearest of target",
    ),
    "the mass of one row of queries is left out": Fault(
        "add_mass",
        "int row = 0; row < piece.rows",
        "int row = 1; row < piece.rows",
        caught="mass after a step",
    ),
    "weights of a block are taken as those of all": Fault(
        "add_mass",
        "total.factor(maxima_of(...)[row]) / total.total",
        "1 / total.total",
        caught="mass after a step",
    ),
}

CODES = {
    "levels stay where they begin": Fault(
        "upper_levels", "step < kSteps", "step < 0 * kSteps", caught="level,"
    ),
    "values have the signs of keys": Fault(
        "Codebook::Codebook", "drawn(seed,", "drawn(kKeySeed + 0 * seed,", caught="signs of a seed"
    ),
    "a norm is the square of a length": Fault(
        "encode_row",
        "static_cast<float>(std::sqrt(squares))",
        "static_cast<float>(squares)",
        caught="norm of a coded row",
    ),
    "a norm is that of the row": Fault(
        "encode_row",
        "length / static_cast<float>(std::sqrt(coded))",
        "length",
        caught="norm of a coded row",
    ),
    "rows are not in the basis of their codes": Fault(
        "encode_row", "rotate(book.signs, row);", "", caught="code of"
    ),
    "bits of a code in the next word are forgotten": Fault(
        "encode_row", "pending >>= 32;", "pending = 0;", caught="code of"
    ),
    "bits of a code in the next word are not read": Fault(
        "decode_row",
        "code |= words[bit / 32 + 1] << (32 - shift);",
        "code |= 0;",
        caught="element of a row from codes",
    ),
    "a row that is read has no norm": Fault(
        "decode_row",
        "levels[code & mask] * norm",
        "levels[code & mask] * (norm > 0)",
        caught="element of a row from codes",
    ),
    "rows stay in the basis of their codes": Fault(
        "decode_row", "restore(book.signs, row);", "", caught="element of a row from codes"
    ),
}

THREADS = {
    "two workers of a job have one number": Fault(
        "Workers::help",
        "static_cast<int>(places(ticket))",
        "static_cast<int>(places(ticket) + 1) / 2",
        caught="two threads have one number",
    ),
    "a sleeping thread is not woken": Fault(
        "Workers::wake", "wake_.notify_one();", ";", caught="a thread did not wake up to help"
    ),
    "a child believes in its parent's threads": Fault(
        "workers_for",
        "pthread_atfork(nullptr, nullptr, begin_child) == 0;",
        "begin_child != nullptr;",
        caught="a child ended with status",
    ),
}
FAULTS = ATTENTION | ROWS | FOLDING | CODES | THREADS

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "native", TOOLS.compile_all)


def test_the_unchanged_kernels_pass(objects: Path, tmp_path: Path) -> None:
    found = TOOLS.complaint(sorted(objects.glob("*.o")), tmp_path / "unchanged", "\0")
    assert found.startswith("status 0:"), found


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(objects: Path, tmp_path: Path, fault: Fault) -> None:
    TOOLS.assert_caught(objects, tmp_path, fault)
