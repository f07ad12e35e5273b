// Checked arguments, as the back ends receive them.
#pragma once

#include <optional>

#include "owned.h"

namespace mlx_h2o_c {

inline constexpr auto attention_name = "scaled_dot_product_attention_with_scores";

// Arrays are borrowed from the caller, but for the mask: it is broadcast to [B, Hq, Lq, N], or
// empty. An additive mask masks at or below `mask_threshold`.
struct AttentionRequest {
  mlx_array queries;
  mlx_array keys;
  mlx_array values;
  float scale;
  bool causal;
  Array mask;
  mlx_dtype mask_dtype;
  float mask_threshold;
  mlx_array sinks;  // may be empty
  bool return_lse;
  mlx_stream stream;
  bool on_gpu;

  int batch;
  int heads;
  int kv_heads;
  int length;
  int rows;
  int head_size;
  int value_size;

  bool has_bool_mask() const { return !mask.empty() && mask_dtype == MLX_BOOL; }
  bool has_additive_mask() const { return !mask.empty() && mask_dtype != MLX_BOOL; }
};

struct AttentionResult {
  Array out;
  Array scores;
  Array lse;  // empty where it was not asked for
};

// Of the N rows of a head `count` are dropped.
struct RetentionRequest {
  mlx_array scores;
  mlx_array positions;
  int batch;
  int heads;
  int rows;
  int count;
  int sink_size;
  std::optional<int> recent_start;
  mlx_stream stream;
  bool on_gpu;
};

// Both throw std::invalid_argument whose text begins with the operation's name.
AttentionRequest attention_request(mlx_array queries, mlx_array keys, mlx_array values, float scale,
                                   const char* mask_mode, mlx_array mask, mlx_array sinks,
                                   bool return_lse, mlx_stream stream);
RetentionRequest keep_request(mlx_array scores, mlx_array positions, int keep, int sink_size,
                              mlx_optional_int recent_start, mlx_stream stream);
RetentionRequest evict_request(mlx_array scores, mlx_array positions, int count, int sink_size,
                               mlx_optional_int recent_start, mlx_stream stream);

}  // namespace mlx_h2o_c
