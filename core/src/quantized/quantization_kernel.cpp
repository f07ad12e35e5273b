#include "quantized/quantization_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/thread_pool.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF  // CMake sets it for GCC
#endif

namespace mlx_h2o::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kMaxGroup = 128;
constexpr int kMaxCodes = 1024;

struct Affine {
  float scale, bias;
};

// Appends values of a few bits to words, from the lowest bit on.
class BitWriter {
 public:
  explicit BitWriter(uint32_t* words) : words_(words) {}

  void put(const uint8_t* values, int count, int bits) {
    for (int i = 0; i < count; ++i) put(values[i], bits);
  }

 private:
  void put(uint32_t value, int bits) {
    pending_ |= static_cast<uint64_t>(value) << filled_;
    filled_ += bits;
    if (filled_ < 32) return;
    *words_++ = static_cast<uint32_t>(pending_);
    pending_ >>= 32;
    filled_ -= 32;
  }

  uint32_t* words_;
  uint64_t pending_ = 0;
  int filled_ = 0;
};

#define MLX_H2O_SWEEPS "quantized/quantization_sweeps.h"
#include "cpu/simd_each_target.h"
#undef MLX_H2O_SWEEPS

template <typename T>
void dequantize_groups(const PackedRow& row, int width, float* to) {
  const T* scales = static_cast<const T*>(row.scales);
  const T* biases = static_cast<const T*>(row.biases);
  const uint64_t mask = (uint64_t{1} << row.bits) - 1;
  for (int i = 0; i < width; ++i) {
    const int bit = i * row.bits;
    uint64_t pair = row.words[bit / 32];
    if (bit % 32 + row.bits > 32) pair |= static_cast<uint64_t>(row.words[bit / 32 + 1]) << 32;
    const auto level = static_cast<float>((pair >> (bit % 32)) & mask);
    const int group = i / row.group_size;
    to[i] = level * to_float(scales[group]) + to_float(biases[group]);
  }
}

}  // namespace

int64_t element_size(ElementType type) { return type == ElementType::float32 ? 4 : 2; }

void round_row(ElementType type, const float* from, int width, void* to) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    for (int i = 0; i < width; ++i) static_cast<T*>(to)[i] = round_to<T>(from[i]);
  });
}

void quantize_row(ElementType type, const void* from, int width, const PackedRow& to,
                  SimdTarget target) {
  if (to.codes != nullptr) {
    float row[kMaxCodes];
    MLX_H2O_CALL_TARGET(target, widen_any(type, from, width, row));
    return encode_row(*to.codes, row, to.words, static_cast<float*>(to.scales));
  }
  MLX_H2O_CALL_TARGET(target, quantize_any(type, from, to, width));
}

void dequantize_row(ElementType type, const PackedRow& row, int width, float* to) {
  if (row.codes != nullptr) {
    return decode_row(*row.codes, row.words, *static_cast<const float*>(row.scales), to);
  }
  with_type(type, [&](auto zero) { dequantize_groups<decltype(zero)>(row, width, to); });
}

PackedRow packed_row(ElementType type, const PackedRow& first, int width, int64_t row) {
  const int64_t words = static_cast<int64_t>(width) * first.bits / 32;
  const int64_t group_bytes = width / first.group_size * element_size(type);
  PackedRow result = first;
  result.words += row * words;
  if (first.codes != nullptr) {
    result.scales = static_cast<float*>(first.scales) + row;
    return result;
  }
  result.scales = static_cast<char*>(first.scales) + row * group_bytes;
  result.biases = static_cast<char*>(first.biases) + row * group_bytes;
  return result;
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
    const char* row = static_cast<const char*>(a.from) + from * element_size(a.type);
    if (a.dense != nullptr) {
      const int64_t bytes = a.width * element_size(a.type);
      std::memcpy(static_cast<char*>(a.dense) + slot * bytes, row, static_cast<size_t>(bytes));
      return;
    }
    quantize_row(a.type, row, a.width, packed_row(a.type, a.to, a.width, slot), target);
  };
  // A few thousand elements take a few microseconds, which is worth a thread.
  parallel_for(int64_t{a.batch} * a.heads * a.new_rows, quantize_one,
               std::max<int64_t>(1, 16384 / a.width));
}

}  // namespace mlx_h2o::kernels
