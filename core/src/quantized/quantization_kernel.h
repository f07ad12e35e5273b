// Affine quantisation of rows into their slots, on plain memory: no MLX in here.
#pragma once

#include <cstdint>

#include "attention/attention_kernel.h"

namespace mlx_h2o::kernels {

/// One packed row: element i takes the bits [i * bits, (i + 1) * bits) of its words, counted from
/// the lowest bit of the first; each `group_size` elements share a scale and a bias.
struct PackedRow {
  uint32_t* words = nullptr;
  void* scales = nullptr;
  void* biases = nullptr;
  int bits = 8;         // 2, 3, 4, 5, 6 or 8
  int group_size = 64;  // 32, 64 or 128
  // If set, the row is codes of its direction in 2, 3 or 4 bits, and its only scale is its norm, in
  // float32.
  const Codebook* codes = nullptr;
};

/// Rows that follow each other in memory: dense, or packed if `dense` is null.
struct StoredRows {
  ElementType type;  // of dense elements, and of scales and biases
  int width;
  void* dense = nullptr;
  PackedRow packed = {};  // the first row

  char* dense_row(int64_t row) const {
    return static_cast<char*>(dense) + row * width * element_size(type);
  }
  PackedRow packed_row(int64_t row) const;
};

/// Stores a row of elements of the type of `to`. Packs as mx.quantize (affine mode, CPU) does, bit
/// for bit.
void write_row(const void* from, const StoredRows& to, int64_t row, SimdTarget target);

/// Unpacks a row to elements of its type: level * scale + bias in float32, rounded once; codes are
/// also rotated back.
void read_row(const StoredRows& from, int64_t row, void* to);

/// New rows, and where they go. The last axis of the rows has stride 1.
struct QuantizationArguments {
  int batch, heads, new_rows;
  StoredRows to;            // [batch, heads, rows]
  int rows;                 // of a head there
  const void* from;         // [batch, heads, new_rows, width] of the type of `to`
  int64_t from_strides[3];  // count elements
  const uint32_t* slots;    // [batch, heads, new_rows]; beyond the last row: the last row
  int64_t slot_strides[3];
};

/// Writes each new row to its slot, shared by the threads of thread_pool.h.
void quantize_rows(const QuantizationArguments& arguments, SimdTarget target);

}  // namespace mlx_h2o::kernels
