#include "quantization_kernel.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "half.h"

namespace mlx_h2o::kernels {
namespace {

struct Affine {
  float scale, bias;
};

// MLX's choice: the edge of the greater magnitude is representable exactly, and so is 0.
template <typename T>
Affine affine_of_group(const T* values, int count, float levels) {
  float low = std::numeric_limits<float>::infinity();
  float high = -low;
  for (int i = 0; i < count; ++i) {
    const float value = to_float(values[i]);
    low = std::min(low, value);
    high = std::max(high, value);
  }
  const bool negative = std::fabs(low) > std::fabs(high);
  const float step = std::max((high - low) / levels, 1e-7f);
  const float scale = negative ? step : -step;
  const float edge = negative ? low : high;
  const float zero = std::rint(edge / scale);
  if (zero == 0) return {scale, 0};
  return {edge / zero, edge};
}

// Appends values of a few bits to words, from the lowest bit on.
class BitWriter {
 public:
  explicit BitWriter(uint32_t* words) : words_(words) {}

  void put(uint32_t value, int bits) {
    pending_ |= static_cast<uint64_t>(value) << filled_;
    filled_ += bits;
    if (filled_ < 32) return;
    *words_++ = static_cast<uint32_t>(pending_);
    pending_ >>= 32;
    filled_ -= 32;
  }

 private:
  uint32_t* words_;
  uint64_t pending_ = 0;
  int filled_ = 0;
};

template <typename T>
void quantize_row(const QuantizationArguments& a, const T* from, uint32_t* words, T* scales,
                  T* biases) {
  const auto levels = static_cast<float>((1 << a.bits) - 1);
  BitWriter writer(words);
  for (int first = 0; first < a.width; first += a.group_size) {
    const auto [scale, bias] = affine_of_group(from + first, a.group_size, levels);
    for (int i = 0; i < a.group_size; ++i) {
      const float level = std::rint((to_float(from[first + i]) - bias) / scale);
      // In this order NaN becomes 0.
      const float clamped = level > 0 ? std::min(level, levels) : 0;
      writer.put(static_cast<uint32_t>(clamped), a.bits);
    }
    *scales++ = round_to<T>(scale);
    *biases++ = round_to<T>(bias);
  }
}

template <typename T>
void quantize_all(const QuantizationArguments& a) {
  const int64_t word_count = static_cast<int64_t>(a.width) * a.bits / 32;
  const int64_t group_count = a.width / a.group_size;
  for (int batch = 0; batch < a.batch; ++batch) {
    for (int head = 0; head < a.heads; ++head) {
      for (int row = 0; row < a.new_rows; ++row) {
        const uint32_t wanted =
            a.slots[batch * a.slot_strides[0] + head * a.slot_strides[1] + row * a.slot_strides[2]];
        const auto last = static_cast<uint32_t>(a.rows - 1);
        const int64_t slot = (static_cast<int64_t>(batch) * a.heads + head) * a.rows +
                             static_cast<int64_t>(std::min(wanted, last));
        const T* from = static_cast<const T*>(a.from) + batch * a.from_strides[0] +
                        head * a.from_strides[1] + row * a.from_strides[2];
        quantize_row(a, from, a.words + slot * word_count,
                     static_cast<T*>(a.scales) + slot * group_count,
                     static_cast<T*>(a.biases) + slot * group_count);
      }
    }
  }
}

}  // namespace

void quantize_rows(const QuantizationArguments& arguments) {
  switch (arguments.type) {
    case ElementType::float32:
      return quantize_all<float>(arguments);
    case ElementType::float16:
      return quantize_all<Float16>(arguments);
    case ElementType::bfloat16:
      return quantize_all<BFloat16>(arguments);
  }
}

}  // namespace mlx_h2o::kernels
