// Inputs of the native test: typed elements on memory of exactly their size, NaN around the blocks.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "attention/attention_kernel.h"
#include "check.h"
#include "cpu/half.h"

namespace mlx_h2o::test {

using kernels::ElementType;

inline constexpr ElementType kElementTypes[] = {ElementType::float32, ElementType::float16,
                                                ElementType::bfloat16};

/// The strides of row-major [batch, heads, rows, ...], with this many elements in a row.
inline void set_strides(int64_t* strides, int64_t row, int rows, int heads) {
  strides[2] = row;
  strides[1] = row * rows;
  strides[0] = strides[1] * heads;
}

/// An entry of packed words, whose bits may go on in the next word.
inline unsigned entry(const uint32_t* words, int index, int bits) {
  unsigned found = 0;
  for (int bit = 0; bit < bits; ++bit) {
    const int at = index * bits + bit;
    found |= (words[at / 32] >> (at % 32) & 1u) << bit;
  }
  return found;
}

/// Elements of one type in memory of exactly their size, and the same values in float64.
class Elements {
 public:
  Elements(ElementType type, size_t count) : type_(type), bytes_(count * size()), wide_(count) {}

  void set(size_t index, float value) {
    kernels::with_type(type_, [&]<typename T>(T) { put(index, kernels::round_to<T>(value)); });
  }

  double operator[](int64_t index) const { return *from(index); }
  const double* from(int64_t index) const { return wide_.data() + index; }
  float read(size_t index) const {
    float value = 0;
    kernels::with_type(type_, [&]<typename T>(T) { value = kernels::to_float(get<T>(index)); });
    return value;
  }
  void* data() { return bytes_.data(); }
  bool same_bits(const Elements& other) const { return bytes_ == other.bytes_; }
  size_t count() const { return wide_.size(); }

 private:
  size_t size() const { return static_cast<size_t>(kernels::element_size(type_)); }

  template <typename T>
  void put(size_t index, T value) {
    std::memcpy(bytes_.data() + index * sizeof(T), &value, sizeof(T));
    wide_[index] = static_cast<double>(kernels::to_float(value));
  }
  template <typename T>
  T get(size_t index) const {
    T value;
    std::memcpy(&value, bytes_.data() + index * sizeof(T), sizeof(T));
    return value;
  }

  ElementType type_;
  std::vector<unsigned char> bytes_;
  std::vector<double> wide_;
};

/// A block [batch, heads, rows, width] inside a larger one, NaN around it.
struct Block {
  Block(Random& random, ElementType type, int batch, int heads, int rows, int width)
      : elements(type, 0) {
    const int slack_rows = random.one_in(2) ? random.between(1, 3) : 0;
    const int slack_width = random.one_in(2) ? random.between(1, 9) : 0;
    set_strides(strides, width + slack_width, rows + slack_rows, heads);
    // The last row of the last head ends the memory: nothing may be read behind it.
    const int64_t count =
        (batch - 1) * strides[0] + (heads - 1) * strides[1] + (rows - 1) * strides[2] + width;
    elements = Elements(type, static_cast<size_t>(count));
    for (size_t i = 0; i < elements.count(); ++i) {
      elements.set(i, std::numeric_limits<float>::quiet_NaN());
    }
    for (int b = 0; b < batch; ++b) {
      for (int h = 0; h < heads; ++h) {
        for (int r = 0; r < rows; ++r) {
          for (int d = 0; d < width; ++d) {
            elements.set(static_cast<size_t>(at(b, h, r) + d), random.normal());
          }
        }
      }
    }
  }

  int64_t at(int b, int h, int r) const { return b * strides[0] + h * strides[1] + r * strides[2]; }

  Elements elements;
  int64_t strides[3];
};

}  // namespace mlx_h2o::test
