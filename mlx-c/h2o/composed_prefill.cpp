// Scores of a long chunk, one number per key, without a matrix of all queries by all keys: logits
// are made in blocks.
#include <cmath>

#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

// The logits of one block, in float32, take at most this much, or one row or column of them; more
// on a GPU, where a block is a dozen launches.
constexpr int64_t block_bytes = 1 << 21, block_bytes_on_gpu = 1 << 24;

struct Range {
  int first;
  int last;
};

// Blocks of queries or keys, each with so many pairs in every head.
std::vector<Range> blocks(const AttentionRequest& r, int count, int64_t pairs) {
  const int64_t most = r.on_gpu ? block_bytes_on_gpu : block_bytes;
  const int64_t size = std::max<int64_t>(1, most / (int64_t{4} * r.batch * r.heads * pairs));
  std::vector<Range> ranges;
  for (int64_t first = 0; first < count; first += size) {
    const int64_t last = std::min<int64_t>(first + size, count);
    ranges.push_back({static_cast<int>(first), static_cast<int>(last)});
  }
  return ranges;
}

// The logits of some queries and some keys, computed after `after`: without an order MLX may begin
// many blocks before it ends the first.
Value block(const AttentionRequest& r, Range queries, mlx_array all_keys, Range keys,
            mlx_array after) {
  const mlx_stream s = r.stream;
  AttentionRequest part{};
  static_cast<AttentionArguments&>(part) = r;
  static_cast<AttentionNumbers&>(part) = r;
  part.causal = false;
  static_cast<AttentionSizes&>(part) = r;
  part.queries = tied(slice(r.queries, 2, queries.first, queries.last, s), {after});
  part.keys.parts.push_back(slice(all_keys, 2, keys.first, keys.last, s));
  part.length = queries.last - queries.first;
  part.rows = keys.last - keys.first;
  Array bias;
  if (r.row_bias.ctx != nullptr) {
    bias = slice(r.row_bias, 2, keys.first, keys.last, s);
    part.row_bias = bias;
  }
  part.mask_threshold = r.mask_threshold;
  if (r.causal) {
    const int newest = r.rows - r.length;
    const Value last(range(newest + queries.first, newest + queries.last, MLX_INT32, s), s);
    const Value columns(range(keys.first, keys.last, MLX_INT32, s), s);
    part.mask = broadcast(columns.then(mlx_less_equal, last.reshaped({part.length, 1})),
                          {r.batch, r.heads, part.length, part.rows}, s);
  } else if (!r.mask.empty()) {
    const Array rows = slice(r.mask, 2, queries.first, queries.last, s);
    part.mask = slice(rows, 3, keys.first, keys.last, s);
  }
  return logits(part);
}

Value moving_average(const PrefillRequest& r) {
  const mlx_stream s = r.stream;
  // Of no row so far: one NaN in memory.
  const Array importance = r.importance.ctx != nullptr
                               ? copied(r.importance)
                               : broadcast(number(NAN), {r.batch, r.kv_heads, r.rows}, s);
  const bool masked = r.causal || !r.mask.empty() || r.row_bias.ctx != nullptr;
  std::vector<Array> parts;
  Array after = slice(importance, 2, 0, 0, s);
  for (const Range keys : blocks(r, r.rows, r.length)) {
    const Value scores = block(r, {0, r.length}, r.keys.parts[0], keys, after);
    const Array before = slice(importance, 2, keys.first, keys.last, s);
    parts.push_back(accumulate_scores({before, scores, r.decay, masked, s}));
    after = copied(parts.back());
  }
  return {call(mlx_concatenate_axis, vector_of(parts), 2, s), s};
}

// The sum of the weights over all queries, and over the query heads of the KV head.
Value mass(const PrefillRequest& r) {
  const mlx_stream s = r.stream;
  const Array keys = call(mlx_astype, r.keys.parts[0], MLX_FLOAT32, s);  // not in every block
  Value mass(zeros({r.batch, r.kv_heads, r.rows}, s), s);
  for (const Range queries : blocks(r, r.length, r.rows)) {
    const Softmax parts = softmax(block(r, queries, keys, {0, r.rows}, mass), r.sinks, r.heads, s);
    const Value nothing = parts.total.then(mlx_equal, number(0));
    const int rows = r.heads / r.kv_heads * (queries.last - queries.first);
    const Value weights = parts.weights.reshaped({r.batch, r.kv_heads, rows, r.rows});
    const Value weighed = nothing.where(number(0), parts.total.then(mlx_reciprocal))
                              .reshaped({r.batch, r.kv_heads, 1, rows})
                              .then(mlx_matmul, weights);
    mass = mass + weighed.then(mlx_squeeze_axis, 2);
  }
  return mass;
}

}  // namespace

Array add_mass(const AttentionAccumulateRequest& r, mlx_array scores, mlx_array lse) {
  const mlx_stream s = r.stream;
  const Value lses(lse, s), importance(r.importance, s);
  const Value nothing = lses.then(mlx_equal, number(-INFINITY));
  const Value shifts = nothing.where(number(INFINITY), lses).then(mlx_expand_dims, 3);
  const Value weights =
      (Value(scores, s) - shifts)
          .then(mlx_exp)
          .reshaped({r.batch, r.kv_heads, r.heads / r.kv_heads * r.length, r.rows});
  return importance.then(mlx_isnan).where(number(0), importance) +
         weights.then(mlx_sum_axis, 2, false);
}

Array prefill_scores(const PrefillRequest& r) { return r.mass ? mass(r) : moving_average(r); }

}  // namespace mlx_h2o_c::composed
