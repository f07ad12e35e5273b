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
  const Array zones = integers({r.sink_size, r.recent_start.value_or(never)});
  Names names;
  names.buffers = {{"scores", r.scores}, {"positions", r.positions}, {"zones", zones}};
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
  const Array zones = integers({r.sink_size, r.recent_start.value_or(never), r.count});
  Names names;
  names.buffers = {{"scores", r.scores}, {"positions", r.positions}, {"zones", zones}};
  names.arguments = {{"NS", number(simdgroups)}};
  names.outputs = {{"kept", {{r.batch, r.heads, r.rows - r.count}, MLX_UINT32}}};
  return std::move(launch(mlx_h2o_keep_rows_text, {}, names, {r.batch * r.heads * threads, 1, 1},
                          {threads, 1, 1}, r.stream)["kept"]);
}

namespace {

// The row chosen, its score and position written by one launch.
Array chosen(const ReplaceRequest& r, Replaced& rest) {
  const Array zones = integers({r.sink_size, r.recent_start.value_or(never), r.position});
  Array ranks;
  if (r.ranked_by == RankedBy::array || r.ranked_by == RankedBy::key_diversity) {
    ranks = composed::ranks(r);
  }
  const int batch = mlx_array_dim(r.positions, 0), heads = mlx_array_dim(r.positions, 1);
  const std::vector<int> rows = {batch, heads, mlx_array_dim(r.positions, 2)};
  Names names;
  names.buffers = {{"scores", ranks},
                   {"importance", r.importance},
                   {"positions", r.positions},
                   {"zones", zones}};
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

// What is remembered of the new row in the slots, in one launch.
Replaced marked(const ReplaceRequest& r, mlx_array slots) {
  const int batch = mlx_array_dim(r.positions, 0), heads = mlx_array_dim(r.positions, 1);
  const int rows = mlx_array_dim(r.positions, 2);
  const Array place = integers({r.position});
  Names names;
  names.buffers = {
      {"slots", slots}, {"importance", r.importance}, {"positions", r.positions}, {"place", place}};
  names.arguments = {{"NS", number(simdgroups)}};
  names.outputs = {{"new_importance", {{batch, heads, rows}, MLX_FLOAT32}},
                   {"new_positions", {{batch, heads, rows}, MLX_INT32}}};
  const int width = (rows + threads - 1) / threads * threads;
  std::map<std::string, Array> made = launch(mlx_h2o_mark_row_text, {}, names,
                                             {width, batch * heads, 1}, {threads, 1, 1}, r.stream);
  Replaced rest;
  rest.importance = std::move(made["new_importance"]);
  rest.positions = std::move(made["new_positions"]);
  return rest;
}

// In one launch; of other head sizes, composed.
KeyStatistics updated_statistics(const ReplaceRequest& r, mlx_array slots,
                                 const std::vector<Array>& new_key) {
  const int size = r.keys.size;
  if (size % lanes != 0 || size > widest_head) {
    return composed::updated_statistics(r, slots, new_key);
  }
  const int batch = mlx_array_dim(r.positions, 0), heads = mlx_array_dim(r.positions, 1);
  Names names;
  names.buffers = {{"slots", slots}, {"key_sum", r.key_sum}, {"inverse_norms", r.inverse_norms}};
  names.arguments = {{"T", type(r.new_keys)}, {"D", number(size)}, {"NS", number(simdgroups)}};
  if (r.keys.packed()) {
    const char* const parts[] = {"words", "scales", "biases"};
    for (size_t i = 0; i < 3; ++i) {
      names.buffers[std::string("key_") + parts[i]] = r.keys.parts[i];
      names.buffers[std::string("new_") + parts[i]] = new_key[i];
    }
    names.arguments["KB"] = number(r.keys.bits);
    names.arguments["G"] = number(r.keys.group_size);
  } else {
    names.buffers["stored_keys"] = r.keys.parts[0];
    names.buffers["new_keys"] = new_key[0];
  }
  names.outputs = {
      {"new_key_sum", {{batch, heads, size}, MLX_FLOAT32}},
      {"new_inverse_norms", {{batch, heads, mlx_array_dim(r.positions, 2)}, MLX_FLOAT32}}};
  std::map<std::string, Array> made = launch(
      r.keys.packed() ? mlx_h2o_update_statistics_quantized_text : mlx_h2o_update_statistics_text,
      {}, names, {batch * heads * threads, 1, 1}, {threads, 1, 1}, r.stream);
  return {std::move(made["new_key_sum"]), std::move(made["new_inverse_norms"])};
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

// A launch chooses the row and writes its score and position, one packs the new row, one updates
// the statistics; a scatter writes each stored array.
Replaced replace_worst(const ReplaceRequest& r) {
  if (!r.on_gpu) {
    return composed::replace_worst(r);
  }
  Replaced rest;
  Array slots;
  if (r.worst.ctx == nullptr) {
    slots = chosen(r, rest);
  } else {
    slots = composed::slots_of(r, evict_indices);
    rest = marked(r, slots);
  }
  Appended fresh;
  if (r.keys.packed()) {
    fresh = packed(r.new_keys, r.new_values, r.keys, r.values, r.stream);
  } else {
    fresh = {composed::as_stored(r.keys, r.new_keys, r.stream),
             composed::as_stored(r.values, r.new_values, r.stream)};
  }
  if (r.key_sum.ctx != nullptr) {
    KeyStatistics updated = updated_statistics(r, slots, fresh.keys);
    rest.key_sum = std::move(updated.key_sum);
    rest.inverse_norms = std::move(updated.inverse_norms);
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
