// Rows as a norm and codes of a rotated direction (TurboQuant), on plain memory: no MLX in here.
// docs/design.md says what the bits mean; operations/composed/turbo.py is the definition.
#pragma once

#include <cstdint>
#include <vector>

namespace mlx_h2o::kernels {

inline constexpr uint32_t kKeySeed = 42, kValueSeed = 43;

/// What the codes of rows of one size stand for; the seed is that of keys or of values.
struct Codebook {
  int size, bits;
  float levels[16];   // those of 2 and 3 bits again and again: upper bits of an index are free
  float between[15];  // means of neighbours
  std::vector<float> signs;  // [size]: +1 and -1

  Codebook(int size, int bits, uint32_t seed);
};

/// Whether rows of so many elements can be kept so.
inline bool has_codebook(int size) {
  return size >= 32 && size <= 1024 && (size & (size - 1)) == 0;
}

/// Made at its first use and kept for good. Any thread may ask.
const Codebook& codebook(int size, int bits, uint32_t seed);

/// H diag(s) x / sqrt(d), in place: a row, or a query, in the basis of the codes.
void rotate(const std::vector<float>& signs, float* row);

/// The other way: diag(s) H y / sqrt(d).
void restore(const std::vector<float>& signs, float* row);

/// Codes, and the norm, of `row`, which is written over. The norm makes the row that is read as
/// long as this one.
void encode_row(const Codebook& book, float* row, uint32_t* words, float* norm);

/// The row that they stand for, in its own basis.
void decode_row(const Codebook& book, const uint32_t* words, float norm, float* row);

}  // namespace mlx_h2o::kernels
