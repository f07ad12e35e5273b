// Integers of a few bits, one after the other, from the lowest bit of the first word on.
#pragma once

#include <cstdint>

namespace mlx_h2o::kernels {

/// Integer number `index`, whose bits may go on in the next word.
inline uint32_t read_bits(const uint32_t* words, int64_t index, int bits) {
  const int64_t bit = index * bits, word = bit / 32;
  const int shift = static_cast<int>(bit % 32);
  uint32_t found = words[word] >> shift;
  if (shift + bits > 32) found |= words[word + 1] << (32 - shift);
  return found & ((1u << bits) - 1);
}

/// Appends integers; a word is written when it is full.
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

}  // namespace mlx_h2o::kernels
