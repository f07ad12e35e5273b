// Processes long chunks in blocks, without a matrix of all queries by all keys: attention, and the
// scores of a chunk, one number per key.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

// The most bytes for the float32 logits of a block, unless one row or column needs more. A GPU gets
// larger blocks, because each one costs a dozen launches.
constexpr int64_t block_bytes = 1 << 21, block_bytes_on_gpu = 1 << 24;

constexpr int queries_of_a_block = 128;  // for attention

// Consecutive ranges of this size that cover `count`.
std::vector<Range> ranges(int count, int64_t size) {
  std::vector<Range> found;
  for (int64_t first = 0; first < count; first += size) {
    const int64_t last = std::min<int64_t>(first + size, count);
    found.push_back({static_cast<int>(first), static_cast<int>(last)});
  }
  return found;
}

// Blocks of queries or keys, each with `pairs` pairs in every head.
std::vector<Range> blocks(const AttentionRequest& r, int count, int64_t pairs) {
  const int64_t most = r.on_gpu ? block_bytes_on_gpu : block_bytes;
  return ranges(count, std::max<int64_t>(1, most / (int64_t{4} * r.batch * r.heads * pairs)));
}

// The array that the next part must wait for.
mlx_array latest(const std::vector<Array>& made) {
  return made.empty() ? mlx_array{} : mlx_array(made.back());
}

Value moving_average(const AccumulatingRequest& r, const AttentionRequest& all) {
  const mlx_stream s = r.stream;
  // Without importance, no row is scored: one NaN, broadcast.
  const Array importance = r.importance.ctx != nullptr
                               ? copied(r.importance)
                               : broadcast(number(NAN), {r.batch, r.kv_heads, r.rows}, s);
  const bool masked = !all.mask.empty() || !r.row_bias.empty();
  std::vector<Array> parts;
  for (const Range keys : blocks(r, r.rows, r.length)) {
    const Value scores = logits(part_of(all, {0, r.length}, keys, latest(parts)));
    const Array before = slice(importance, 2, keys.first, keys.last, s);
    parts.push_back(accumulate_scores({before, scores, r.decay, masked, s}));
  }
  return {call(mlx_concatenate_axis, vector_of(parts), 2, s), s};
}

// The sum of the weights over all queries, and over the query heads of the KV head.
Value mass(const AttentionRequest& r) {
  Value mass(zeros({r.batch, r.kv_heads, r.rows}, r.stream), r.stream);
  for (const Range queries : blocks(r, r.length, r.rows)) {
    mass = mass + weights(logits(part_of(r, queries, {0, r.rows}, mass)), r.sinks)
                      .reshaped({r.batch, r.kv_heads, -1, r.rows})
                      .then(mlx_sum_axis, 2, false);
  }
  return mass;
}

}  // namespace

AttentionRequest part_of(const AttentionRequest& r, Range queries, Range keys, mlx_array after) {
  const auto of = [&](mlx_array array, size_t axis, Range range) {
    return slice(array, axis, range.first, range.last, r.stream);
  };
  const auto rows_of = [&](const Rows& rows) {
    Rows some = {{}, rows.bits, rows.group_size, rows.size};
    for (const Array& each : rows.parts) some.parts.push_back(of(each, 2, keys));
    return some;
  };
  AttentionRequest part{r, of(r.queries, 2, queries), rows_of(r.keys), rows_of(r.values), {}, {}};
  if (after.ctx != nullptr) part.queries = tied(part.queries, {after});
  part.length = queries.last - queries.first;
  part.rows = keys.last - keys.first;
  if (!r.mask.empty()) part.mask = of(of(r.mask, 2, queries), 3, keys);
  if (!r.row_bias.empty()) part.row_bias = of(r.row_bias, 2, keys);
  return part;
}

AttentionRequest unpacked(const AttentionRequest& r, mlx_dtype dtype) {
  AttentionRequest all = part_of(r, {0, r.length}, {0, r.rows});
  for (Rows* rows : {&all.keys, &all.values}) {
    if (rows->parts.empty()) continue;
    Array array = dense(*rows, r.stream, dtype);
    rows->bits = rows->group_size = 0;
    rows->parts.resize(1);
    rows->parts[0] = std::move(array);
  }
  if (r.causal && r.mask.empty()) all.mask = broadcast(causal_mask(r), r.pairs(), r.stream);
  return all;
}

Array in_blocks(const AttentionRequest& r,
                const std::function<Array(const AttentionRequest&)>& attend) {
  std::vector<Array> parts;
  for (const Range queries : ranges(r.length, queries_of_a_block)) {
    // Bottom-right: the last query of a block sees the rows up to its own.
    const int seen = r.causal ? std::max(1, r.rows - r.length + queries.last) : r.rows;
    parts.push_back(attend(part_of(r, queries, {0, seen}, latest(parts))));
  }
  return call(mlx_concatenate_axis, vector_of(parts), 2, r.stream);
}

Array add_mass(const AccumulatingRequest& r, mlx_array scores, mlx_array lse) {
  const mlx_stream s = r.stream;
  const Value importance(r.importance, s);
  const Value shifts = Value(lse, s).at_least(number(-FLT_MAX)).then(mlx_expand_dims, 3);
  const Value weights =
      (Value(scores, s) - shifts).then(mlx_exp).reshaped({r.batch, r.kv_heads, -1, r.rows});
  return importance.then(mlx_isnan).where(number(0), importance) +
         weights.then(mlx_sum_axis, 2, false);
}

Array prefill_scores(const AccumulatingRequest& r) {
  const AttentionRequest all = unpacked(r, MLX_FLOAT32);
  return r.mass ? mass(all) : moving_average(r, all);
}

}  // namespace mlx_h2o_c::composed
