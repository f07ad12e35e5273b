#include "metal_rows.h"

#include <climits>

#include "arrays.h"
#include "composed.h"
#include "metal_kernel.h"

namespace mlx_h2o_c::metal {

namespace {

constexpr int simdgroups = 8;  // of a threadgroup: few registers, so any GPU runs it
constexpr int threads = simdgroups * lanes;
constexpr int never = INT_MAX;  // a position that no row has

Array integers(const std::vector<int32_t>& values) {
  const int count = static_cast<int>(values.size());
  return Array(mlx_array_new_data(values.data(), &count, 1, MLX_INT32));
}

// int32 [B]; one number for all has no stride. Empty: no window.
Array of_sequences(mlx_array numbers, int batch, mlx_stream s) {
  return numbers.ctx == nullptr ? broadcast(integer(never), {batch}, s)
                                : broadcast(numbers, {batch}, s);
}

}  // namespace

// One thread per row and KV head; any number of queries and of heads.
Array accumulate_scores(const AccumulateRequest& r) {
  if (!r.on_gpu) {
    return composed::accumulate_scores(r);
  }
  const int batch = mlx_array_dim(r.importance, 0), heads = mlx_array_dim(r.importance, 1);
  const int rows = mlx_array_dim(r.importance, 2);
  const Array params = floats({static_cast<float>(r.decay), static_cast<float>(1 - r.decay)});
  Names names;
  names.buffers = {{"importance", r.importance}, {"scores", r.scores}, {"params", params}};
  names.arguments = {{"NS", number(simdgroups)}};
  names.outputs = {{"accumulated", {{batch, heads, rows}, MLX_FLOAT32}}};
  const int width = (rows + threads - 1) / threads * threads;
  return std::move(launch(mlx_h2o_accumulate_scores_text, {}, names, {width, batch * heads, 1},
                          {threads, 1, 1}, r.stream)["accumulated"]);
}

// One threadgroup per head.
Array evict_indices(const RetentionRequest& r) {
  if (r.count > 1 || !r.on_gpu) {
    return composed::evict_indices(r);
  }
  const Array zones = integers({r.sink_size});
  const Array starts = of_sequences(r.recent_start, r.batch, r.stream);
  Names names;
  names.buffers = {{"scores", r.scores},
                   {"positions", r.positions},
                   {"recent_starts", starts},
                   {"zones", zones}};
  names.arguments = {{"NS", number(simdgroups)}};
  names.outputs = {{"worst", {{r.batch, r.heads, 1}, MLX_UINT32}}};
  return std::move(launch(mlx_h2o_choose_row_text, {}, names, {r.batch * r.heads * threads, 1, 1},
                          {threads, 1, 1}, r.stream)["worst"]);
}

// One threadgroup per head; fewer rows are dropped than there are.
Array keep_indices(const RetentionRequest& r) {
  if (r.count == 0 || !r.on_gpu) {
    return composed::keep_indices(r);
  }
  const Array zones = integers({r.sink_size, r.count});
  const Array starts = of_sequences(r.recent_start, r.batch, r.stream);
  Names names;
  names.buffers = {{"scores", r.scores},
                   {"positions", r.positions},
                   {"recent_starts", starts},
                   {"zones", zones}};
  names.arguments = {{"NS", number(simdgroups)}};
  names.outputs = {{"kept", {{r.batch, r.heads, r.rows - r.count}, MLX_UINT32}}};
  return std::move(launch(mlx_h2o_keep_rows_text, {}, names, {r.batch * r.heads * threads, 1, 1},
                          {threads, 1, 1}, r.stream)["kept"]);
}

namespace {

// The row chosen, its score and position written by one launch.
Array chosen(const ReplaceRequest& r, Replaced& rest) {
  const Array zones = integers({r.sink_size});
  Array ranks;
  if (r.ranked_by == RankedBy::array || r.ranked_by == RankedBy::key_diversity) {
    ranks = composed::ranks(r);
  }
  const int batch = mlx_array_dim(r.positions, 0), heads = mlx_array_dim(r.positions, 1);
  const std::vector<int> rows = {batch, heads, mlx_array_dim(r.positions, 2)};
  const Array starts = of_sequences(r.recent_start, batch, r.stream);
  const Array newest = of_sequences(r.position, batch, r.stream);
  Names names;
  names.buffers = {{"scores", ranks},          {"importance", r.importance},
                   {"positions", r.positions}, {"recent_starts", starts},
                   {"newest", newest},         {"zones", zones}};
  names.arguments = {{"NS", number(simdgroups)}, {"AGE", boolean(r.ranked_by == RankedBy::age)}};
  names.outputs = {{"worst", {{batch, heads, 1}, MLX_UINT32}},
                   {"new_importance", {rows, MLX_FLOAT32}},
                   {"new_positions", {rows, MLX_INT32}}};
  std::map<std::string, Array> made =
      launch(ranks.empty() ? mlx_h2o_replace_row_text : mlx_h2o_replace_row_ranked_text, {}, names,
             {batch * heads * threads, 1, 1}, {threads, 1, 1}, r.stream);
  rest.importance = std::move(made["new_importance"]);
  rest.positions = std::move(made["new_positions"]);
  return std::move(made["worst"]);
}

// New keys and values packed in one launch, one simdgroup per group of elements.
Appended packed(mlx_array keys, mlx_array values, const Rows& key_rows, const Rows& value_rows,
                mlx_stream stream) {
  Names names;
  names.buffers = {{"new_keys", keys}, {"new_values", values}};
  names.arguments = {{"T", type(keys)},
                     {"S", type(values)},
                     {"KB", number(key_rows.bits)},
                     {"VB", number(value_rows.bits)},
                     {"G", number(key_rows.group_size)}};
  size_t groups = 0;
  const struct {
    const char* name;
    mlx_array rows;
    int bits;
  } sides[] = {{"key", keys, key_rows.bits}, {"value", values, value_rows.bits}};
  for (const auto& [name, rows, bits] : sides) {
    std::vector<int> shape(4);
    for (int axis = 0; axis < 4; ++axis) {
      shape[axis] = mlx_array_dim(rows, axis);
    }
    const int size = shape[3];
    groups += mlx_array_size(rows) / key_rows.group_size;
    shape[3] = size / key_rows.group_size;
    for (const char* part : {"_scales", "_biases"}) {
      names.outputs[std::string(name) + part] = {shape, mlx_array_dtype(rows)};
    }
    shape[3] = static_cast<int>(int64_t{size} * bits / 32);
    names.outputs[std::string(name) + "_words"] = {shape, MLX_UINT32};
  }
  std::map<std::string, Array> made =
      launch(mlx_h2o_pack_rows_text, {}, names, {static_cast<int>(groups) * lanes, 1, 1},
             {lanes, 1, 1}, stream);
  Appended result;
  for (const char* part : {"_words", "_scales", "_biases"}) {
    result.keys.push_back(std::move(made[std::string("key") + part]));
    result.values.push_back(std::move(made[std::string("value") + part]));
  }
  return result;
}

}  // namespace

// A launch chooses the row and writes its score and position, one packs the new row; a scatter
// writes each stored array.
Replaced replace_worst(const ReplaceRequest& r) {
  if (!r.on_gpu) {
    return composed::replace_worst(r);
  }
  Replaced rest;
  const Array slots = chosen(r, rest);
  Appended fresh;
  if (r.keys.packed()) {
    fresh = packed(r.new_keys, r.new_values, r.keys, r.values, r.stream);
  } else {
    fresh = {composed::as_stored(r.keys, r.new_keys, r.stream),
             composed::as_stored(r.values, r.new_values, r.stream)};
  }
  return composed::replaced(r, slots, fresh.keys, fresh.values, std::move(rest));
}

Appended quantize_append(const AppendRequest& r) {
  if (!r.on_gpu) {
    return composed::quantize_append(r);
  }
  const Appended fresh = packed(r.new_keys, r.new_values, r.keys, r.values, r.stream);
  return composed::written(r, fresh.keys, fresh.values);
}

}  // namespace mlx_h2o_c::metal
