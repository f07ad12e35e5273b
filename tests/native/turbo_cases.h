// Rows as codes of rotated directions, and back, against the definition in float64.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "elements.h"
#include "quantized/turbo_kernel.h"

namespace mlx_h2o::test {

/// What is fixed for good, or files and other languages would read other rows: the signs of 64
/// elements, as mx.random.uniform draws them, and the levels of 3 bits of 128 elements.
inline void test_codebooks(Report& report) {
  using kernels::codebook;
  const struct {
    uint32_t seed;
    uint64_t positive;
  } drawn[] = {{kernels::kKeySeed, 0x62de4802b769548e}, {kernels::kValueSeed, 0x2359e1396b21b6bb}};
  for (const auto& [seed, positive] : drawn) {
    uint64_t found = 0;
    const std::vector<float>& signs = codebook(64, 3, seed).signs;
    for (size_t i = 0; i < signs.size(); ++i) found |= uint64_t{signs[i] > 0} << i;
    if (found != positive) report.mismatch("signs of a seed, %u", seed);
  }
  const double levels[] = {.02160, .06659, .11814, .18840};
  for (int i = 0; i < 4; ++i) {
    const double found = static_cast<double>(codebook(128, 3, kernels::kKeySeed).levels[4 + i]);
    if (std::abs(found - levels[i]) > 1e-5) report.mismatch("level, %d: %g", i, found);
  }
}

/// One row: its norm, each code, and what comes back.
inline void test_coded_row(Random& random, int size, int bits, uint32_t seed, Report& report) {
  const kernels::Codebook& book = kernels::codebook(size, bits, seed);
  const auto count = static_cast<size_t>(size);
  std::vector<float> row(count);
  for (float& element : row) element = 3 * random.normal();
  double squares = 0;
  for (const float element : row) squares += std::pow(static_cast<double>(element), 2);
  std::vector<double> direction(count);
  for (size_t i = 0; i < count; ++i) {
    for (size_t j = 0; j < count; ++j) {
      const double sign = std::popcount(i & j) % 2 == 0 ? 1 : -1;
      direction[i] += sign * static_cast<double>(book.signs[j] * row[j]);
    }
    direction[i] /= std::sqrt(squares * size);
  }

  std::vector<uint32_t> words(count * static_cast<size_t>(bits) / 32);
  float norm = 0;
  std::vector<float> coded = row;
  kernels::encode_row(book, coded.data(), words.data(), &norm);
  std::vector<double> levels(count);
  double coded_squares = 0;
  for (size_t i = 0; i < count; ++i) {
    const unsigned code = entry(words.data(), static_cast<int>(i), bits);
    const auto edge = [&](unsigned k) {
      return (static_cast<double>(book.levels[k]) + static_cast<double>(book.levels[k + 1])) / 2;
    };
    constexpr double kRounding = 1e-6;
    const bool low = code > 0 && direction[i] < edge(code - 1) - kRounding;
    const bool high = code + 1 < 1u << bits && direction[i] > edge(code) + kRounding;
    if (low || high) report.mismatch("code of %d bits, element %zu of %d", bits, i, size);
    levels[i] = static_cast<double>(book.levels[code]);
    coded_squares += levels[i] * levels[i];
  }
  const double exact = std::sqrt(squares / coded_squares);  // what is read is as long as the row
  if (std::abs(static_cast<double>(norm) / exact - 1) > 1e-6) {
    report.mismatch("norm of a coded row, %d elements: %g", size, static_cast<double>(norm));
  }

  std::vector<float> back(count);
  kernels::decode_row(book, words.data(), norm, back.data());
  for (size_t j = 0; j < count; ++j) {
    double element = 0;
    for (size_t i = 0; i < count; ++i) {
      element += (std::popcount(i & j) % 2 == 0 ? 1 : -1) * levels[i];
    }
    element *= static_cast<double>(book.signs[j]) * exact / std::sqrt(size);
    if (std::abs(element - static_cast<double>(back[j])) > 1e-5 * std::sqrt(squares)) {
      report.mismatch("element of a row from codes, %zu of %d", j, size);
    }
  }
}

inline void test_codes(Random& random, int cases, Report& report) {
  test_codebooks(report);
  for (int i = 0; i < cases / 10 + 1; ++i) {
    const int size = 32 << random.between(0, i % 10 == 0 ? 5 : 3);
    const uint32_t seed = random.choose({kernels::kKeySeed, kernels::kValueSeed});
    for (int bits = 2; bits <= 4; ++bits) test_coded_row(random, size, bits, seed, report);
  }
  const kernels::Codebook& book = kernels::codebook(32, 3, kernels::kKeySeed);
  std::vector<float> zeros(32);
  std::vector<uint32_t> words(3);
  float norm = 1;
  kernels::encode_row(book, zeros.data(), words.data(), &norm);
  kernels::decode_row(book, words.data(), norm, zeros.data());
  for (const float element : zeros) {
    if (norm != 0 || element != 0) report.mismatch("row of zeros: %g", static_cast<double>(norm));
  }
}

}  // namespace mlx_h2o::test
