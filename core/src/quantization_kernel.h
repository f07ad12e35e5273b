// Affine quantisation of rows into their slots, on plain memory: no MLX in here.
#pragma once

#include <cstdint>

#include "attention_kernel.h"

namespace mlx_h2o::kernels {

/// New rows of one tensor and the packed tensor they go to. The last axis of the rows has stride 1;
/// the packed arrays are contiguous.
struct QuantizationArguments {
  int batch, heads, new_rows;
  int rows, width;  // of the packed tensor
  int bits, group_size;
  ElementType type;         // of the rows, scales and biases
  const void* from;         // [batch, heads, new_rows, width]
  int64_t from_strides[3];  // count elements
  const uint32_t* slots;    // [batch, heads, new_rows]; beyond the last row: the last row
  int64_t slot_strides[3];
  uint32_t* words;  // [batch, heads, rows, width * bits / 32]
  void* scales;     // [batch, heads, rows, width / group_size]
  void* biases;
};

/// Writes each new row to its slot as mx.quantize (affine mode, CPU) packs it, bit for bit: element
/// i of a row takes the bits from i * bits on, counted from the lowest bit of its first word.
void quantize_rows(const QuantizationArguments& arguments);

}  // namespace mlx_h2o::kernels
