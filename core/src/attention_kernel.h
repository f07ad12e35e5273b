// Dense attention with scores on plain memory: no MLX in here, so that tests can drive it alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "accumulation_kernel.h"

namespace mlx_h2o::kernels {

enum class ElementType { float32, float16, bfloat16 };
enum class MaskType { none, boolean, float32, float16, bfloat16 };
enum class SimdTarget { scalar, avx2, avx512, neon };

/// Every target that there is, the best first.
inline constexpr SimdTarget kSimdTargets[] = {SimdTarget::avx512, SimdTarget::avx2,
                                              SimdTarget::neon, SimdTarget::scalar};

/// One call. Strides count elements; the last axis of queries, keys and values has stride 1.
struct AttentionArguments {
  int batch, query_heads, kv_heads;
  int query_count, key_count;
  int width, value_width;  // D and Dv

  ElementType type;  // of queries, keys, values and out
  const void* queries;
  const void* keys;
  const void* values;
  int64_t query_strides[3];  // batch, head, query
  int64_t key_strides[3];    // batch, head, key
  int64_t value_strides[3];

  MaskType mask_type = MaskType::none;
  const void* mask = nullptr;
  int64_t mask_strides[4] = {0, 0, 0, 0};  // batch, head, query, key; 0 where it broadcasts
  float mask_threshold = 0;                // additive values at or below it mask their pair

  const float* sinks = nullptr;  // [query_heads]; null: none
  int64_t sink_stride = 1;
  float scale = 1;
  bool causal = false;  // bottom-right aligned

  void* out;  // [batch, query_heads, query_count, value_width], contiguous
  bool return_scores = true;
  float* scores = nullptr;  // [batch, query_heads, query_count, key_count], contiguous
  float* lse = nullptr;     // [batch, query_heads, query_count], contiguous; null: not wanted

  bool accumulate = false;      // whether the scores of this call enter `importance`
  float* importance = nullptr;  // [batch, kv_heads, key_count], contiguous, updated in place
  Decay decay = {0, 1};
};

/// The number of floats that `attention` needs as scratch memory; it looks at no pointer. Where
/// scores are returned it does not grow with the number of keys, else by at most 256 rows of them;
/// `accumulate` adds two rows for each query.
size_t attention_workspace_size(const AttentionArguments& arguments);

/// Computes out, and scores, lse and importance where they are wanted. Keys and values are read
/// once for all query heads and queries of their KV head, up to 256 (head, query) rows; above that
/// once for each 256 rows.
void attention(const AttentionArguments& arguments, SimdTarget target, float* workspace);

/// Whether this machine can run the target.
bool is_supported(SimdTarget target);

/// The target's name, as MLX_H2O_SIMD spells it.
const char* target_name(SimdTarget target);

/// The best target of this machine, or the one that the environment variable MLX_H2O_SIMD names.
/// Throws std::invalid_argument where that names none, or one that this machine cannot run.
SimdTarget simd_target();

}  // namespace mlx_h2o::kernels
