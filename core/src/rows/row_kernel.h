// Reads rows of a cache, dense or packed, on plain memory: no MLX in here.
#pragma once

#include <cstdint>

#include "quantized/quantization_kernel.h"

namespace mlx_h2o::kernels {

/// Keys or values [heads, rows, width] of a cache, contiguous: dense, or packed if `dense` is null.
/// `type` is the type of dense elements, or of scales and biases.
struct StoredRows {
  ElementType type;
  int width;
  void* dense = nullptr;
  PackedRow packed = {};  // the first row
};

/// Bytes of one element.
int64_t element_size(ElementType type);

/// Rounds elements to the dtype of the rows.
void round_row(ElementType type, const float* from, int width, void* to);

/// Row number `row` in float32, dequantised if it is packed.
void read_row(const StoredRows& from, int64_t row, float* to);

}  // namespace mlx_h2o::kernels
