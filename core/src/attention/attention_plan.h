// How one call is divided into pieces, by its shape alone: the number of threads changes no result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/attention_kernel.h"

namespace mlx_h2o::kernels {

inline constexpr int kStep = 64;        // keys whose values are summed in registers
inline constexpr int kMaxRows = 256;    // (query head, query) rows that share a read of the keys
inline constexpr int kMaxBlock = 1024;  // keys whose logits are held at a time
inline constexpr int kMinSpan = 512;    // keys that are worth an item
inline constexpr int64_t kItems = 64;   // enough to keep many threads busy to the end
inline constexpr int64_t kBlockFloats = int64_t{1} << 15;
inline constexpr int64_t kWorkspaceFloats = int64_t{1} << 24;

/// The rows of a KV head make one unit, or several if there are many. The keys of a unit are
/// divided into spans. An item is one span of one unit, the piece of work that a thread takes.
struct Plan {
  int64_t head_rows;    // query heads of a KV head * queries
  int64_t tile_rows;    // of a unit
  int64_t tiles;        // units of a KV head
  int64_t units;        // of the call
  int64_t spans;        // of a unit
  int64_t span_keys;    // of a span; a multiple of kStep
  int64_t block_keys;   // of a block, into which a span is divided
  int64_t query_width;  // padded, as is value_width
  int64_t value_width;
  bool two_phases;         // all weights are known before any value is read
  bool keep_logits;        // in the workspace: two phases need them, and the caller wants none
  int64_t partial_floats;  // results of an item: maxima, totals, shares skipped, sums
  int64_t span_blocks;     // of a span
  int64_t weights_at;      // offset in a unit of the weights kept until all totals are known
  int64_t unit_floats;     // of the workspace
  int64_t wave;            // units in the workspace at a time

  explicit Plan(const AttentionArguments& a)
      : head_rows(static_cast<int64_t>(a.query_heads / a.kv_heads) * a.query_count),
        // The moving average takes all rows of a head in order.
        tile_rows(a.accumulate ? head_rows : std::min<int64_t>(head_rows, kMaxRows)),
        tiles((head_rows + tile_rows - 1) / tile_rows),
        units(int64_t{a.batch} * a.kv_heads * tiles),
        query_width(padded(a.width)),
        value_width(padded(a.value_width)),
        two_phases(a.sparse_v_threshold > 0),
        keep_logits(two_phases && !a.return_scores) {
    const int64_t most = (int64_t{a.key_count} + kMinSpan - 1) / kMinSpan;
    const int64_t wanted = std::clamp<int64_t>((kItems + units - 1) / units, 1, most);
    const int64_t steps = (a.key_count + kStep - 1) / kStep;
    span_keys = (steps + wanted - 1) / wanted * kStep;
    spans = (a.key_count + span_keys - 1) / span_keys;
    const int64_t fitting = kBlockFloats / tile_rows / kStep * kStep;
    block_keys = std::clamp<int64_t>(fitting, kStep, std::min<int64_t>(kMaxBlock, span_keys));
    partial_floats = tile_rows * (3 + value_width);
    span_blocks = (span_keys + block_keys - 1) / block_keys;
    const int64_t pairs = tile_rows * a.key_count;
    weights_at = spans * partial_floats + (keep_logits ? pairs : 0);
    // The weights, and the maximum of each row and block that they are relative to.
    unit_floats = weights_at + (a.mass ? pairs + tile_rows * spans * span_blocks : 0);
    wave = std::clamp<int64_t>(kWorkspaceFloats / unit_floats, 1, units);
  }
};

/// One unit of a plan, or one span of it.
struct Piece {
  int batch, kv_head;
  int64_t first_row;  // counted within the KV head: head of the group * query_count + query
  int rows;
  int first_key, last_key;  // the end of the range
  float* unit;              // its part of the workspace

  Piece(const AttentionArguments& a, const Plan& plan, int64_t index, int64_t span, float* memory)
      : batch(static_cast<int>(index / plan.tiles / a.kv_heads)),
        kv_head(static_cast<int>(index / plan.tiles % a.kv_heads)),
        first_row(index % plan.tiles * plan.tile_rows),
        rows(static_cast<int>(std::min(plan.tile_rows, plan.head_rows - first_row))),
        first_key(static_cast<int>(span * plan.span_keys)),
        last_key(static_cast<int>(std::min<int64_t>((span + 1) * plan.span_keys, a.key_count))),
        unit(memory) {}

  int64_t cache_head(const AttentionArguments& a) const {
    return int64_t{batch} * a.kv_heads + kv_head;
  }
  /// Its first row, counted among all rows of the outputs.
  int64_t output_row(const AttentionArguments& a, const Plan& plan) const {
    return cache_head(a) * plan.head_rows + first_row;
  }
};

/// The results of an item, in the workspace.
struct Partial {
  float* maxima;   // [rows]
  float* totals;   // [rows], relative to the maxima
  float* skipped;  // [rows], counts
  float* sums;     // [rows, value_width], relative to the maxima

  Partial(const Plan& plan, const Piece& piece, int64_t span)
      : maxima(piece.unit + span * plan.partial_floats),
        totals(maxima + plan.tile_rows),
        skipped(totals + plan.tile_rows),
        sums(skipped + plan.tile_rows) {}
};

/// The number of elements of a packed row that are unpacked together; they share a scale.
inline int packed_run(const Packing& packing, int most) {
  return std::min(most, packing.group_size);
}

/// Whether rows are unpacked in registers; others are unpacked to memory first.
inline bool is_unpacked_in_registers(const Packing& packing) {
  return packing.bits == 8 || packing.bits <= 4;
}

/// Whether the elements are unpacked in another order.
inline bool is_reordered(const Packing& packing) { return packing.bits != 0 && packing.bits <= 4; }

/// The element at a place of a run of unpacked codes of up to 4 bits: groups of eight follow each
/// other, and each shift extracts the same code of all groups.
inline int code_order(int place, int run) {
  const int groups = run / 8;
  return place % groups * 8 + place / groups;
}

}  // namespace mlx_h2o::kernels
