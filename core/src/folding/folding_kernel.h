// Which rows of a cache are folded into which, and the resulting rows, on plain memory: no MLX in
// here.
#pragma once

#include <cstdint>

#include "attention/attention_kernel.h"

namespace mlx_h2o::kernels {

/// One call. Strides count elements; the last axis of keys and values has stride 1.
struct FoldingArguments {
  int batch, heads, rows, width, value_width;
  int keep;  // rows that stay in each head; `going` is the number of evicted rows
  int going() const { return rows - keep; }
  ElementType type;
  const void* keys;    // [batch, heads, rows, width]
  const void* values;  // [batch, heads, rows, value_width]
  int64_t key_strides[3], value_strides[3];
  // [batch, heads, rows]: ln n of the n rows that each row stands for, the masses, which add up,
  // the weights in means, and whether others may be folded into a row.
  const float *bias, *mass, *weights;
  const bool* eligible;
  int64_t bias_strides[3], mass_strides[3], weight_strides[3], eligible_strides[3];
  double share;          // of the evicted rows, the share to fold, rounded up
  const uint32_t* kept;  // [batch, heads, keep], ascending
  int64_t kept_strides[3];

  // Contiguous: the changed rows, one for each evicted row.
  uint32_t* into;  // [batch, heads, going]: their slots
  void* new_keys;  // [batch, heads, going, width]
  void* new_values;
  float* new_bias;
  float* new_mass;
};

/// Folds each evicted row into the nearest eligible row that stays, as
/// python/mlx_h2o/operations/composed/folding.py defines it.
void fold(const FoldingArguments& arguments, SimdTarget target);

}  // namespace mlx_h2o::kernels
