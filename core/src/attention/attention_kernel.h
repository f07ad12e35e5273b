// Attention over dense or packed rows on plain memory: no MLX in here, so that tests can run it
// alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cpu/half.h"
#include "mlx_h2o/attention_numbers.h"
#include "quantized/turbo_kernel.h"
#include "rows/accumulation_kernel.h"

namespace mlx_h2o::kernels {

enum class SimdTarget { scalar, avx2, avx512, neon };

/// Every target, the best first.
inline constexpr SimdTarget kSimdTargets[] = {SimdTarget::avx512, SimdTarget::avx2,
                                              SimdTarget::neon, SimdTarget::scalar};

/// A number of floats in whole vectors of the widest target.
inline int64_t padded(int64_t width) { return (width + 15) / 16 * 16; }

/// How keys or values are packed. Element i of a row is the integer in the bits [i * bits, (i + 1)
/// * bits) of its words, times the scale plus the bias of its group (affine, as mx.quantize does).
/// With a codebook, it is the level of that code times the scale, in the basis of the codes; the
/// scale is the norm of the row, the group is the row, and there are no biases.
struct Packing {
  int bits = 0;  // 0: not packed; 2, 3, 4, 5, 6 or 8
  int group_size = 0;
  ElementType type = ElementType::float32;  // of scales and biases
  const void* scales = nullptr;
  const void* biases = nullptr;
  int64_t scale_strides[3] = {0, 0, 0};  // batch, head, key; the last axis has stride 1
  int64_t bias_strides[3] = {0, 0, 0};
  const Codebook* codes = nullptr;
};

/// One call. Strides count elements; the last axis of queries, keys and values has stride 1.
struct AttentionArguments : AttentionNumbers {
  int batch, query_heads, kv_heads;
  int query_count, key_count;
  int width, value_width;  // D and Dv

  ElementType type;  // of queries, out, and unpacked keys and values
  const void* queries;
  const void* keys;
  const void* values;
  int64_t query_strides[3];  // batch, head, query
  int64_t key_strides[3];    // batch, head, key; in words if the rows are packed
  int64_t value_strides[3];
  Packing key_packing, value_packing;

  const void* mask = nullptr;  // null: none
  bool mask_is_boolean = false;
  ElementType mask_type = ElementType::float32;  // of an additive mask
  int64_t mask_strides[4] = {0, 0, 0, 0};        // batch, head, query, key; 0 where it broadcasts
  float mask_threshold = 0;                      // additive values at or below it mask their pair

  const float* sinks = nullptr;  // [query_heads]; null: none
  int64_t sink_stride = 1;
  const float* row_bias = nullptr;  // [batch, kv_heads, key_count], added to the logits; or null
  int64_t row_bias_strides[2] = {0, 0};  // batch, head; the last axis has stride 1
  bool accumulate = false;  // adds the scores of this call to `importance`, or the weights:
  bool mass = false;        // summed over all queries of a KV head; else the moving average

  float* skipped = nullptr;  // [batch, query_heads, query_count]: the share skipped, or null

  void* out;                // [batch, query_heads, query_count, value_width], contiguous
  float* scores = nullptr;  // [batch, query_heads, query_count, key_count], contiguous
  float* lse = nullptr;     // [batch, query_heads, query_count], contiguous; null: not wanted

  float* importance = nullptr;  // [batch, kv_heads, importance_rows], contiguous, updated in place
  int importance_rows = 0;      // at least key_count, the surplus is unchanged; 0: key_count
  Decay decay = {0, 1};
};

/// The number of floats that `attention` needs as scratch memory; dereferences no pointer. At most
/// 64 MB, unless one KV head needs more. It holds a float for every (row, key) pair only for the
/// mass, and for a sparse threshold without `return_scores`.
size_t attention_workspace_size(const AttentionArguments& arguments);

/// Computes out, and scores, lse and importance if requested. Keys and values are read once for all
/// query heads and queries of their KV head, up to 256 (head, query) rows, and once more for each
/// further 256 rows. The threads of thread_pool.h share the work; the results do not depend on
/// their number.
void attention(const AttentionArguments& arguments, SimdTarget target, float* workspace);

/// Whether this machine can run the target.
bool is_supported(SimdTarget target);

/// The target's name, as MLX_H2O_SIMD spells it.
const char* target_name(SimdTarget target);

/// The best target of this machine, or the one that the environment variable MLX_H2O_SIMD names.
/// Throws std::invalid_argument if it names none, or one that this machine cannot run.
SimdTarget simd_target();

}  // namespace mlx_h2o::kernels
