// Keys or values of the native test, dense or packed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention/attention_kernel.h"
#include "check.h"
#include "elements.h"

namespace mlx_h2o::test {

/// Keys or values: dense, or packed with NaN around scales and biases; each in memory of exactly
/// its size. The values are those that attention must see.
class StoredBlock {
 public:
  StoredBlock(Random& random, ElementType type, int batch, int heads, int rows, int width,
              kernels::Packing packing)
      : packing_(packing),
        dense_(random, type, batch, heads, packing.bits == 0 ? rows : 1,
               packing.bits == 0 ? width : 1),
        scales_(random, packing.type, batch, heads, rows, groups(width)),
        biases_(random, packing.type, batch, heads, rows, groups(width)),
        heads_(static_cast<size_t>(heads)),
        rows_(static_cast<size_t>(rows)),
        width_(static_cast<size_t>(width)) {
    if (packing.bits != 0) pack(random, batch, heads, rows, width);
    for (int b = 0; b < batch; ++b) {
      for (int h = 0; h < heads; ++h) {
        for (int row = 0; row < rows; ++row) {
          for (int d = 0; d < width; ++d) values_.push_back(unpacked(b, h, row, d));
          if (packing.codes != nullptr)
            restore(*packing.codes, values_.data() + index(b, h, row, 0));
        }
      }
    }
  }

  const void* data() { return packing_.bits == 0 ? dense_.elements.data() : words_.data(); }
  const int64_t* strides() const { return packing_.bits == 0 ? dense_.strides : strides_; }
  const kernels::Packing& packing() const { return packing_; }
  const double* row(int b, int h, int row) const { return values_.data() + index(b, h, row, 0); }
  /// Makes an element of a row NaN, or where it is packed its whole group.
  void spoil(int b, int h, int row, int d) {
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    int first = d, count = 1;
    if (packing_.bits == 0) {
      dense_.elements.set(static_cast<size_t>(dense_.at(b, h, row) + d), kNan);
    } else {
      count = packing_.group_size;
      first = d / count * count;
      Block& block = packing_.codes == nullptr ? biases_ : scales_;
      block.elements.set(static_cast<size_t>(block.at(b, h, row) + first / count), kNan);
    }
    for (int i = first; i < first + count; ++i) {
      values_[index(b, h, row, i)] = static_cast<double>(kNan);
    }
  }
  /// The most that unpacking in float32 may be off: a product and a bias may nearly cancel.
  double rounding() const { return rounding_; }

 private:
  void pack(Random& random, int batch, int heads, int rows, int width) {
    const int words = width * packing_.bits / 32;
    set_strides(strides_, words + (random.one_in(2) ? random.between(1, 3) : 0), rows, heads);
    const int64_t count = batch * strides_[0] - (strides_[2] - words);
    for (int64_t i = 0; i < count; ++i) {
      words_.push_back(static_cast<uint32_t>(random.between(0, 0x7fffffff)) * 2654435769u);
    }
    packing_.scales = scales_.elements.data();
    std::copy_n(scales_.strides, 3, packing_.scale_strides);
    if (packing_.codes != nullptr) return;
    packing_.biases = biases_.elements.data();
    std::copy_n(biases_.strides, 3, packing_.bias_strides);
  }

  /// The row itself, of one in the basis of its codes: the Walsh-Hadamard transform in float64.
  static void restore(const kernels::Codebook& book, double* row) {
    const auto size = static_cast<size_t>(book.size);
    for (size_t bit = 1; bit < size; bit *= 2) {
      for (size_t i = 0; i < size; ++i) {
        if ((i & bit) != 0) continue;
        const double low = row[i], high = row[i + bit];
        row[i] = low + high;
        row[i + bit] = low - high;
      }
    }
    for (size_t d = 0; d < size; ++d) {
      row[d] *= static_cast<double>(book.signs[d]) / std::sqrt(static_cast<double>(size));
    }
  }

  double unpacked(int b, int h, int row, int d) {
    if (packing_.bits == 0) return dense_.elements[dense_.at(b, h, row) + d];
    const int64_t first = b * strides_[0] + h * strides_[1] + row * strides_[2];
    const unsigned level = entry(words_.data() + first, d, packing_.bits);
    const int group = d / packing_.group_size;
    if (packing_.codes != nullptr) {
      const double norm = scales_.elements[scales_.at(b, h, row)];
      rounding_ = std::max(rounding_, 0x1p-19 * std::abs(norm));
      return norm * static_cast<double>(packing_.codes->levels[level]);
    }
    const double product = scales_.elements[scales_.at(b, h, row) + group] * level;
    const double bias = biases_.elements[biases_.at(b, h, row) + group];
    rounding_ = std::max(rounding_, 0x1p-23 * (std::abs(product) + std::abs(bias)));
    return product + bias;
  }
  size_t index(int b, int h, int row, int d) const {
    const size_t head = static_cast<size_t>(b) * heads_ + static_cast<size_t>(h);
    return (head * rows_ + static_cast<size_t>(row)) * width_ + static_cast<size_t>(d);
  }
  int groups(int width) const { return packing_.bits == 0 ? 1 : width / packing_.group_size; }

  kernels::Packing packing_;
  Block dense_;
  Block scales_, biases_;
  std::vector<uint32_t> words_;
  int64_t strides_[3] = {0, 0, 0};
  size_t heads_, rows_, width_;
  double rounding_ = 0;
  std::vector<double> values_;  // [batch, heads, rows, width]
};

}  // namespace mlx_h2o::test
