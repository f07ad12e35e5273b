// Which rows of a cache merge, and what becomes of them, on plain memory: no MLX in here.
#pragma once

#include <cstdint>

#include "attention_kernel.h"

namespace mlx_h2o::kernels {

/// One call. Strides count elements; the last axis of keys and values has stride 1.
struct MergingArguments {
  int batch, heads, rows, width, value_width;
  int keep;  // rows that stay of each head; `going` is the number of the others
  int going() const { return rows - keep; }
  ElementType type;
  const void* keys;    // [batch, heads, rows, width]
  const void* values;  // [batch, heads, rows, value_width]
  int64_t key_strides[3], value_strides[3];
  const float* bias;  // [batch, heads, rows]: ln n of the n rows that each stands for
  int64_t bias_strides[3];
  const int32_t* positions;
  int64_t position_strides[3];
  int sink_size;
  const int32_t* recent_start;  // [batch]
  int64_t recent_start_stride;

  // Contiguous. Of the rows that change, one for each row that goes.
  uint32_t* kept;  // [batch, heads, keep], ascending
  uint32_t* into;  // [batch, heads, going]: their slots
  void* new_keys;  // [batch, heads, going, width]
  void* new_values;
  float* new_bias;
  int32_t* new_positions;
};

/// Merges the rows whose merger changes attention least, as python/mlx_h2o/operations/merging.py
/// defines it. Each head compares all its free rows with each other.
void mergers(const MergingArguments& arguments, SimdTarget target);

}  // namespace mlx_h2o::kernels
