// Rows as a norm and codes of a rotated direction (TurboQuant), on plain memory: no MLX in here.
// docs/design.md says what the bits mean; operations/composed/turbo.py is the definition.
#pragma once

#include <cstdint>
#include <vector>

namespace mlx_h2o::kernels {

inline constexpr uint32_t kKeySeed = 42, kValueSeed = 43;

/// The levels and signs for rows of one size; the seed is for keys or for values.
struct Codebook {
  int size, bits;
  float levels[16];          // repeated to fill 16 places: upper bits of an index are ignored
  float between[15];         // means of neighbouring levels
  std::vector<float> signs;  // [size]: +1 and -1

  Codebook(int size, int bits, uint32_t seed);
};

/// Whether rows of this size can be stored as codes.
inline bool has_codebook(int size) {
  return size >= 32 && size <= 1024 && (size & (size - 1)) == 0;
}

/// Made at the first use and kept forever. Thread-safe.
const Codebook& codebook(int size, int bits, uint32_t seed);

/// H diag(s) x / sqrt(d), in place: rotates a row or a query into the basis of the codes.
void rotate(const std::vector<float>& signs, float* row);

/// The inverse: diag(s) H y / sqrt(d).
void restore(const std::vector<float>& signs, float* row);

/// Encodes `row`, which is overwritten, as codes and a norm. The norm gives the decoded row the
/// same length.
void encode_row(const Codebook& book, float* row, uint32_t* words, float* norm);

/// Decodes a row, in its own basis.
void decode_row(const Codebook& book, const uint32_t* words, float norm, float* row);

}  // namespace mlx_h2o::kernels
