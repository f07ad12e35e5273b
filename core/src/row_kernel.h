// Writing one row over another in each head of a cache, on plain memory: no MLX in here.
#pragma once

#include <cstdint>

#include "quantization_kernel.h"

namespace mlx_h2o::kernels {

/// Keys or values [heads, rows, width] of a cache, contiguous: dense, or packed where `dense` is
/// null. `type` is that of dense elements, or of scales and biases.
struct StoredRows {
  ElementType type;
  int width;
  void* dense = nullptr;
  PackedRow packed = {};  // the first row
};

/// One call. Strides count elements; the last axis of new rows has stride 1.
struct RowArguments {
  int batch, heads, rows;
  StoredRows keys, values;
  const void* new_keys;  // [batch, heads, width], in the type of the stored ones
  const void* new_values;
  int64_t new_key_strides[2];  // batch, head
  int64_t new_value_strides[2];
  const uint32_t* slots;    // [batch, heads], contiguous: where
  const int32_t* position;  // [batch] with its stride
  int64_t position_stride;
  float* importance;   // [batch, heads, rows]: NaN, not yet scored
  int32_t* positions;  // [batch, heads, rows]
};

/// Writes the new row of each head over the one at its slot. O(width) per head.
void write_rows(const RowArguments& arguments, SimdTarget target);

/// Bytes of one element.
int64_t element_size(ElementType type);

/// Elements in the dtype of rows.
void round_row(ElementType type, const float* from, int width, void* to);

/// Row number `row` in float32, dequantised in float32 where it is packed.
void read_row(const StoredRows& from, int64_t row, float* to);

}  // namespace mlx_h2o::kernels
