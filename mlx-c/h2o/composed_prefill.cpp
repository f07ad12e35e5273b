// Scores of a long chunk, one number per key, without a matrix of all queries by all keys: logits
// are made in blocks.
#include <cmath>

#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

// The logits of one block, in float32, take at most this much, or one row or column of them.
constexpr int64_t block_bytes = 1 << 21;

struct Range {
  int first;
  int last;
};

std::vector<Range> blocks(int count, int64_t bytes_of_one) {
  const int64_t size = std::max<int64_t>(1, block_bytes / bytes_of_one);
  std::vector<Range> ranges;
  for (int64_t first = 0; first < count; first += size) {
    const int64_t last = std::min<int64_t>(first + size, count);
    ranges.push_back({static_cast<int>(first), static_cast<int>(last)});
  }
  return ranges;
}

int64_t logits_of(const AttentionRequest& r, int64_t pairs) {
  return int64_t{4} * r.batch * r.heads * pairs;
}

// The request of some queries and some keys, computed after `after`: without an order MLX may
// begin many blocks before it ends the first.
AttentionRequest block(const AttentionRequest& r, Range queries, mlx_array all_keys, Range keys,
                       mlx_array after, Array* held) {
  const mlx_stream s = r.stream;
  AttentionRequest part{};
  *held = tied(slice(r.queries, 2, queries.first, queries.last, s), {after});
  part.queries = *held;
  part.keys.parts.push_back(slice(all_keys, 2, keys.first, keys.last, s));
  part.scale = r.scale;
  part.stream = s;
  part.batch = r.batch;
  part.heads = r.heads;
  part.kv_heads = r.kv_heads;
  part.length = queries.last - queries.first;
  part.rows = keys.last - keys.first;
  part.head_size = r.head_size;
  part.mask_dtype = r.mask_dtype;
  part.mask_threshold = r.mask_threshold;
  if (r.causal) {
    const int newest = r.rows - r.length;
    const Array last = range(newest + queries.first, newest + queries.last, MLX_INT32, s);
    const Array columns = range(keys.first, keys.last, MLX_INT32, s);
    const Array seen = call(mlx_less_equal, columns, reshape(last, {part.length, 1}, s), s);
    part.mask = broadcast(seen, {r.batch, r.heads, part.length, part.rows}, s);
    part.mask_dtype = MLX_BOOL;
  } else if (!r.mask.empty()) {
    const Array rows = slice(r.mask, 2, queries.first, queries.last, s);
    part.mask = slice(rows, 3, keys.first, keys.last, s);
  }
  return part;
}

Array moving_average(const PrefillRequest& request) {
  const AttentionRequest& r = request.attention;
  const mlx_stream s = r.stream;
  const Range counted = {0, r.length};
  Array importance;
  if (request.importance.ctx != nullptr) {
    check(mlx_array_set(importance.out(), request.importance));
  } else {
    const int shape[] = {r.batch, r.kv_heads, r.rows};
    importance = call(mlx_full, shape, size_t{3}, number(NAN), MLX_FLOAT32, s);
  }
  const bool masked = r.causal || !r.mask.empty();
  std::vector<Array> parts;
  Array after = slice(importance, 2, 0, 0, s);
  for (const Range keys : blocks(r.rows, logits_of(r, r.length))) {
    Array queries;
    const Array scores = logits(block(r, counted, r.keys.parts[0], keys, after, &queries));
    const Array before = slice(importance, 2, keys.first, keys.last, s);
    parts.push_back(accumulate_scores({before, scores, request.decay, masked, s, r.on_gpu}));
    check(mlx_array_set(after.out(), parts.back()));
  }
  return call(mlx_concatenate_axis, vector_of(parts), 2, s);
}

// The sum of the weights over all queries, and over the query heads of the KV head.
Array mass(const PrefillRequest& request) {
  const AttentionRequest& r = request.attention;
  const mlx_stream s = r.stream;
  const Array keys = upcast(r.keys.parts[0], s);  // once, not for every block
  const int shape[] = {r.batch, r.kv_heads, r.rows};
  Array mass = call(mlx_zeros, shape, size_t{3}, MLX_FLOAT32, s);
  for (const Range queries : blocks(r.length, logits_of(r, r.rows))) {
    Array held;
    const Array scores = logits(block(r, queries, keys, {0, r.rows}, mass, &held));
    const Softmax parts = softmax(scores, r.sinks, r.heads, s);
    const Array shares = call(mlx_where, call(mlx_equal, parts.total, number(0), s), number(0),
                              call(mlx_reciprocal, parts.total, s), s);
    const int rows = r.heads / r.kv_heads * (queries.last - queries.first);
    const Array weighed = call(mlx_matmul, reshape(shares, {r.batch, r.kv_heads, 1, rows}, s),
                               reshape(parts.weights, {r.batch, r.kv_heads, rows, r.rows}, s), s);
    mass = call(mlx_add, mass, call(mlx_squeeze_axis, weighed, 2, s), s);
  }
  return mass;
}

}  // namespace

Array prefill_scores(const PrefillRequest& request) {
  return request.mass ? mass(request) : moving_average(request);
}

}  // namespace mlx_h2o_c::composed
