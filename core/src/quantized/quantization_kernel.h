// Affine quantisation of rows into their slots, on plain memory: no MLX in here.
#pragma once

#include <cstdint>

#include "attention/attention_kernel.h"
#include "cpu/half.h"

namespace mlx_h2o::kernels {

/// Calls `use` with a value of the C++ type of the elements.
template <typename Use>
void with_type(ElementType type, const Use& use) {
  switch (type) {
    case ElementType::float32:
      return use(0.0f);
    case ElementType::float16:
      return use(Float16{});
    case ElementType::bfloat16:
      return use(BFloat16{});
  }
}

/// Bytes of one element.
int64_t element_size(ElementType type);

/// Converts `width` elements to the dtype of rows.
void round_row(ElementType type, const float* from, int width, void* to);

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

/// Packs `width` elements as mx.quantize (affine mode, CPU) does, bit for bit. `type` is the type
/// of the elements, scales and biases.
void quantize_row(ElementType type, const void* from, int width, const PackedRow& to,
                  SimdTarget target);

/// level * scale + bias of each element, in float32; codes are also rotated back.
void dequantize_row(ElementType type, const PackedRow& row, int width, float* to);

/// Row number `row` of contiguous packed arrays whose first row is `first`.
PackedRow packed_row(ElementType type, const PackedRow& first, int width, int64_t row);

/// New rows, and the packed array they go to. The last axis of the rows has stride 1; the packed
/// arrays are contiguous.
struct QuantizationArguments {
  int batch, heads, new_rows;
  int rows, width;          // of the packed tensor
  ElementType type;         // of the rows, scales and biases
  const void* from;         // [batch, heads, new_rows, width]
  int64_t from_strides[3];  // count elements
  const uint32_t* slots;    // [batch, heads, new_rows]; beyond the last row: the last row
  int64_t slot_strides[3];
  PackedRow to;  // the first of [batch, heads, rows]
  void* dense;   // or the first row of unpacked storage
};

/// Writes each new row to its slot, shared by the threads of thread_pool.h.
void quantize_rows(const QuantizationArguments& arguments, SimdTarget target);

}  // namespace mlx_h2o::kernels
