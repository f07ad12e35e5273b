#include "quantized/quantization_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/thread_pool.h"
#include "quantized/packed_bits.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF  // CMake sets it for GCC
#endif

namespace mlx_h2o::kernels {
namespace {

constexpr int kMaxGroup = 128;
constexpr int kMaxCodes = 1024;

struct Affine {
  float scale, bias;
};

#define MLX_H2O_SWEEPS "quantized/quantization_sweeps.h"
#include "cpu/simd_each_target.h"
#undef MLX_H2O_SWEEPS

template <typename T>
void dequantize_groups(const PackedRow& row, int width, float* to) {
  const T* scales = static_cast<const T*>(row.scales);
  const T* biases = static_cast<const T*>(row.biases);
  for (int i = 0; i < width; ++i) {
    const auto level = static_cast<float>(read_bits(row.words, i, row.bits));
    const int group = i / row.group_size;
    to[i] = level * to_float(scales[group]) + to_float(biases[group]);
  }
}

}  // namespace

PackedRow StoredRows::packed_row(int64_t row) const {
  PackedRow result = packed;
  result.words += row * (int64_t{width} * packed.bits / 32);
  if (packed.codes != nullptr) {
    result.scales = static_cast<float*>(packed.scales) + row;
    return result;
  }
  const int64_t group_bytes = width / packed.group_size * element_size(type);
  result.scales = static_cast<char*>(packed.scales) + row * group_bytes;
  result.biases = static_cast<char*>(packed.biases) + row * group_bytes;
  return result;
}

void write_row(const void* from, const StoredRows& to, int64_t row, SimdTarget target) {
  if (to.dense != nullptr) {
    std::memcpy(to.dense_row(row), from, static_cast<size_t>(to.width * element_size(to.type)));
    return;
  }
  const PackedRow packed = to.packed_row(row);
  if (packed.codes == nullptr) {
    return MLX_H2O_CALL_TARGET(target, quantize(to.type, from, packed, to.width));
  }
  float elements[kMaxCodes];
  MLX_H2O_CALL_TARGET(target, widen(to.type, from, 0, to.width, elements));
  encode_row(*packed.codes, elements, packed.words, static_cast<float*>(packed.scales));
}

void read_row(const StoredRows& from, int64_t row, void* to) {
  const PackedRow packed = from.packed_row(row);
  float* elements = thread_memory(from.width);
  with_type(from.type, [&]<typename T>(T) {
    if (packed.codes != nullptr) {
      decode_row(*packed.codes, packed.words, *static_cast<const float*>(packed.scales), elements);
    } else {
      dequantize_groups<T>(packed, from.width, elements);
    }
    for (int i = 0; i < from.width; ++i) static_cast<T*>(to)[i] = round_to<T>(elements[i]);
  });
}

void quantize_rows(const QuantizationArguments& a, SimdTarget target) {
  const auto quantize_one = [&](int64_t item) {
    const int64_t head = item / a.new_rows;
    const int64_t new_row = item % a.new_rows;
    const int64_t batch = head / a.heads;
    const uint32_t wanted = a.slots[batch * a.slot_strides[0] + head % a.heads * a.slot_strides[1] +
                                    new_row * a.slot_strides[2]];
    const auto last = static_cast<uint32_t>(a.rows - 1);
    const int64_t slot = head * a.rows + static_cast<int64_t>(std::min(wanted, last));
    const int64_t from = batch * a.from_strides[0] + head % a.heads * a.from_strides[1] +
                         new_row * a.from_strides[2];
    const char* row = static_cast<const char*>(a.from) + from * element_size(a.to.type);
    write_row(row, a.to, slot, target);
  };
  // A few thousand elements take a few microseconds, which is worth a thread.
  parallel_for(int64_t{a.batch} * a.heads * a.new_rows, quantize_one,
               std::max<int64_t>(1, 16384 / a.to.width));
}

}  // namespace mlx_h2o::kernels
