"""Faults seeded into the native kernels, each of which the native test driver must catch.

A fault is one replacement in a copy of core/src; it must apply exactly once, so that a mutant
always differs from the source. Only the kernel that it touches is compiled again.
"""

import os
import shutil
from pathlib import Path

import pytest

from native_driver import Toolchain

COMPILER = os.environ.get("CXX") or next(
    filter(shutil.which, ("c++", "g++", "clang++")), "no compiler"
)
TOOLS = Toolchain(COMPILER)

# name: (file, text, its replacement, what the driver must complain about)
FAULTS = {
    "a causal query sees one key too many": (
        "attention_rows.h",
        "a.key_count - a.query_count;",
        "a.key_count - a.query_count + 1;",
        "score of target",
    ),
    "query heads are dealt to KV heads in turn": (
        "attention_rows.h",
        "return piece.kv_head * group + static_cast<int>((piece.first_row + row) / a.query_count);",
        "return piece.kv_head + a.kv_heads * static_cast<int>((piece.first_row + row) / "
        "a.query_count) + 0 * group;",
        "of target",
    ),
    "the sink is left out of the denominator": (
        "attention_sweeps.h",
        "total = std::exp(static_cast<double>(sink) - static_cast<double>(shift));",
        "total = 0;",
        "lse of target",
    ),
    "an additive mask is compared below its threshold only": (
        "logit_masks.h",
        "bias <= threshold",
        "bias < 2 * threshold",
        "of target",
    ),
    "the last columns of a value are left out": (
        "attention_tiles.h",
        "for (int d = runs * Source::kRun; d < width; d += kLanes) {\n      add_tail",
        "for (int d = runs * Source::kRun; d + kLanes <= width; d += kLanes) {\n      add_tail",
        "out of target",
    ),
    "a later maximum does not rescale what was summed": (
        "attention_sweeps.h",
        "const float factor = std::exp(before - now);",
        "const float factor = before > now ? 0.0f : 1.0f;",
        "of target",
    ),
    "spans are added as if they had one maximum": (
        "attention_sweeps.h",
        "const double relative = plan.two_phases ? 1 : total.factor(partial.maxima[row]);",
        "const double relative = 1;",
        "out of target",
    ),
    "half bytes are taken in the order of their words": (
        "attention_plan.h",
        "return place % words * 8 + place / words;",
        "return place + 0 * words;",
        "of target",
    ),
    "all groups of a row have the scale of the first": (
        "attention_stored.h",
        "const int group = i / packing.group_size;",
        "const int group = i / packing.group_size * 0;",
        "of target",
    ),
    "a run has the scale of the row's first group": (
        "attention_stored.h",
        "const int64_t group = int64_t{run >> group_shift} * kStep + row;",
        "const int64_t group = row;",
        "of target",
    ),
    "two groups of a row change scales": (
        "attention_stored.h",
        "store(to + row, even);\n      store(to + kStep + row, odd);",
        "store(to + row, odd);\n      store(to + kStep + row, even);",
        "of target",
    ),
    "the second four keys of a tile are the first": (
        "attention_stored.h",
        "return quads[row / 4] + row % 4 * stride;",
        "return quads[row / 8] + row % 4 * stride;",
        "of target",
    ),
    "sparse V skips up to twice its threshold": (
        "attention_sparse.h",
        "static_cast<double>(a.sparse_threshold) * total.total",
        "static_cast<double>(a.sparse_threshold) * 2 * total.total",
        "of target",
    ),
    "a masked pair counts as skipped": (
        "attention_sparse.h",
        "std::popcount(seen & ~wanted)",
        "std::popcount((all & ~wanted) | (seen & 0))",
        "skipped of target",
    ),
    "a row has the weights that another row wants": (
        "attention_sparse.h",
        "store(weights + i, zero_below(x, broadcast(limit), exp_nonpositive(x)));",
        "store(weights + i, exp_nonpositive(x + zero_below(x, broadcast(limit), broadcast(0))));",
        "out of target",
    ),
    "wanted keys are used twice": (
        "attention_sparse.h",
        "std::memmove(keys_, keys_ + used,",
        "std::memmove(keys_, keys_ + 0 * used,",
        "out of target",
    ),
    "a listed row has the scale of its place": (
        "attention_listed.h",
        "together[i] = from[keys[i] * strides[2] + group];",
        "together[i] = from[i * strides[2] + group];",
        "out of target",
    ),
    "wanted keys are taken for neighbours": (
        "attention_sparse.h",
        "return keys[count - 1] - keys[0] == count - 1;",
        "return keys[count - 1] - keys[0] <= count;",
        "out of target",
    ),
    "every probe is the first": (
        "attention_sweeps.h",
        "probe * a.probe_strides[2];",
        "0 * a.probe_strides[2];",
        "probe score of target",
    ),
    "a tie keeps the higher position": (
        "selection_kernel.cpp",
        "return order > other.order;",
        "return order < other.order;",
        "_indices: N=",
    ),
    "NaN ranks as the best score": (
        "selection_kernel.cpp",
        "return unscored(kNotANumber, position);",
        "return unscored(kProtected, position);",
        "_indices: N=",
    ),
    "the recent rows start one later": (
        "selection_kernel.cpp",
        "position >= head.zones.recent_start",
        "position > head.zones.recent_start",
        "_indices: N=",
    ),
    "the last recent row is not protected from replacement": (
        "accumulation_sweeps.h",
        "rank = position >= recent_start ?",
        "rank = position > recent_start ?",
        "evict_indices: N=",
    ),
    "a masked pair pulls the average towards zero": (
        "accumulation_sweeps.h",
        "return mean.count > 0 ? with(absolute(mean.value)) : before;",
        "return with(absolute(mean.value));",
        "importance of target",
    ),
    "the first score is averaged with zero": (
        "accumulation_sweeps.h",
        "return before == before ? result : score;",
        "return before == before ? result : decay.take * score;",
        "importance of target",
    ),
    "padding is no worse than an unscored row": (
        "accumulation_sweeps.h",
        "position < 0 ? Int{} + Worst::kPadding",
        "position < 0 ? Int{} + Worst::kNotANumber",
        "evict_indices: N=",
    ),
    "the newest of equal rows is kept": (
        "accumulation_sweeps.h",
        "(own_rank == rank) & (own_order >= order)",
        "(own_rank == rank) & (own_order < order)",
        "worst row of target",
    ),
    "a query sees one key too many of a chunk": (
        "prefill_sweeps.h",
        "std::clamp<int64_t>(newest + 1 - first, 0, count)",
        "std::clamp<int64_t>(newest + 2 - first, 0, count)",
        "prefill",
    ),
    "the parts of a mass are not added up": (
        "prefill_kernel.cpp",
        "result[key] += from[key];",
        "result[key] = from[key];",
        "prefill mass of target",
    ),
    "every new row is at the position of the first sequence's": (
        "row_kernel.cpp",
        "a.position[batch * a.position_stride];",
        "a.position[0];",
        "row written, case",
    ),
    "the window of the first sequence is that of all": (
        "selection_kernel.cpp",
        "a.zones_of(batch)",
        "a.zones_of(0)",
        "_indices: N=",
    ),
    "keys count by their length": (
        "key_diversity_sweeps.h",
        "add_scaled(key, result[row], width, mean);",
        "add_scaled(key, 1.0f, width, mean);",
        "key diversity of target",
    ),
    "a packed value loses its upper bits at the end of a word": (
        "quantization_kernel.cpp",
        "pending_ >>= 32;",
        "pending_ = 0;",
        "quantised value of target",
    ),
    "a slot beyond the end is the first": (
        "quantization_kernel.cpp",
        "std::min(wanted, last)",
        "wanted > last ? 0 : wanted",
        "quantised value of target",
    ),
    "two workers of a job have one number": (
        "thread_pool.cpp",
        "job_.work(next_, static_cast<int>(places(ticket)));",
        "job_.work(next_, static_cast<int>(places(ticket) + 1) / 2);",
        "two threads have one number",
    ),
    "a sleeping thread is not woken": (
        "thread_pool.cpp",
        "for (; count > 0; --count) wake_.notify_one();",
        "",
        "a thread did not wake up to help",
    ),
    "a child believes in its parent's threads": (
        "thread_pool.cpp",
        "pthread_atfork(nullptr, nullptr, begin_child) == 0;",
        "begin_child != nullptr;",
        "a child ended with status",
    ),
}

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> dict[str, Path]:
    return TOOLS.compile_all(tmp_path_factory.mktemp("native"))


def test_the_unchanged_kernels_pass(objects, tmp_path):
    result = TOOLS.run(list(objects.values()), tmp_path / "unchanged")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_seeded_fault_is_caught(objects, tmp_path, fault):
    TOOLS.assert_caught(objects, tmp_path, fault)
