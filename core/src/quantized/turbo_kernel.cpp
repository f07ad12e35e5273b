#include "turbo_kernel.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "packed_bits.h"

namespace mlx_h2o::kernels {
namespace {

constexpr int kSteps = 100;
constexpr float kLeastNorm = 1e-8f;
constexpr double kRightAngle = 1.5707963267948966;

// The integral of cos(t)^power from 0 to `angle`, for an even power.
double mass(double angle, int power) {
  const double cosine = std::cos(angle), sine = std::sin(angle);
  double total = angle, factor = cosine;
  for (int k = 2; k <= power; k += 2) {
    total = (factor * sine + (k - 1) * total) / k;
    factor *= cosine * cosine;
  }
  return total;
}

// The angle below which `share` of the mass from 0 to pi / 2 lies, by bisection.
double angle_of(double share, int power) {
  double low = 0, high = kRightAngle;
  const double wanted = share * mass(high, power);
  for (int step = 0; step < kSteps; ++step) {
    const double middle = (low + high) / 2;
    (mass(middle, power) < wanted ? low : high) = middle;
  }
  return low;
}

// The upper half of the levels, ascending. They start at the middles of equal shares of the density
// (1 - y^2)^((d-3)/2); each step moves every level to the mean of its cell (Lloyd 1957, Max 1960).
std::vector<double> upper_levels(int size, int bits) {
  const int power = size - 2, half = 1 << (bits - 1);
  std::vector<double> found;
  found.reserve(static_cast<size_t>(half));
  for (int i = 0; i < half; ++i) found.push_back(std::sin(angle_of((i + 0.5) / half, power)));
  for (int step = 0; step < kSteps; ++step) {
    std::vector<double> masses, moments;
    for (int i = 0; i <= half; ++i) {
      const double edge = i == 0      ? 0
                          : i == half ? kRightAngle
                                      : std::asin((found[size_t(i) - 1] + found[size_t(i)]) / 2);
      masses.push_back(mass(edge, power));
      moments.push_back(-std::pow(std::cos(edge), power + 1) / (power + 1));
    }
    for (size_t i = 0; i < found.size(); ++i)
      found[i] = (moments[i + 1] - moments[i]) / (masses[i + 1] - masses[i]);
  }
  return found;
}

// The two words that MLX draws for a counter of two (threefry, Salmon et al. 2011, 20 rounds).
std::pair<uint32_t, uint32_t> drawn(uint32_t seed, uint32_t first, uint32_t second) {
  const uint32_t keys[3] = {0, seed, seed ^ 0x1BD11BDAu};
  constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  first += keys[0];
  second += keys[1];
  for (uint32_t round = 0; round < 5; ++round) {
    for (const int turn : kTurns[round % 2]) {
      first += second;
      second = (second << turn | second >> (32 - turn)) ^ first;
    }
    first += keys[(round + 1) % 3];
    second += keys[(round + 2) % 3] + round + 1;
  }
  return {first, second};
}

// The Walsh-Hadamard transform, divided by sqrt(d), in place.
void transform(float* row, int size) {
  for (int half = 1; half < size; half *= 2) {
    for (int first = 0; first < size; first += 2 * half) {
      for (int i = first; i < first + half; ++i) {
        const float low = row[i], high = row[i + half];
        row[i] = low + high;
        row[i + half] = low - high;
      }
    }
  }
  const float scale = 1 / std::sqrt(static_cast<float>(size));
  for (int i = 0; i < size; ++i) row[i] *= scale;
}

void change_signs(const std::vector<float>& signs, float* row) {
  for (size_t i = 0; i < signs.size(); ++i) row[i] *= signs[i];
}

}  // namespace

Codebook::Codebook(int size_of_rows, int bits_of_codes, uint32_t seed)
    : size(size_of_rows), bits(bits_of_codes), levels{}, between{}, signs(size_t(size_of_rows)) {
  const std::vector<double> upper = upper_levels(size, bits);
  const size_t half = upper.size(), count = 2 * half;
  double all[16] = {};
  for (size_t i = 0; i < half; ++i) {
    all[half + i] = upper[i];
    all[half - 1 - i] = -upper[i];
  }
  for (size_t i = 0; i < 16; ++i) levels[i] = static_cast<float>(all[i & (count - 1)]);
  for (size_t i = 0; i + 1 < count; ++i) between[i] = static_cast<float>((all[i] + all[i + 1]) / 2);
  const auto places = static_cast<uint32_t>(size / 2);
  for (uint32_t i = 0; i < places; ++i) {
    const auto [low, high] = drawn(seed, i, places + i);
    signs[i] = static_cast<float>(low) * 0x1p-32f > 0.5f ? 1.0f : -1.0f;
    signs[places + i] = static_cast<float>(high) * 0x1p-32f > 0.5f ? 1.0f : -1.0f;
  }
}

const Codebook& codebook(int size, int bits, uint32_t seed) {
  static std::mutex mutex;
  static std::map<std::tuple<int, int, uint32_t>, Codebook> books;
  const std::lock_guard lock(mutex);
  const auto key = std::make_tuple(size, bits, seed);
  const auto found = books.find(key);
  if (found != books.end()) return found->second;
  return books.emplace(key, Codebook(size, bits, seed)).first->second;
}

void rotate(const std::vector<float>& signs, float* row) {
  change_signs(signs, row);
  transform(row, static_cast<int>(signs.size()));
}

void restore(const std::vector<float>& signs, float* row) {
  transform(row, static_cast<int>(signs.size()));
  change_signs(signs, row);
}

void encode_row(const Codebook& book, float* row, uint32_t* words, float* norm) {
  double squares = 0;
  for (int i = 0; i < book.size; ++i) squares += double{row[i]} * double{row[i]};
  const float length = std::sqrt(static_cast<float>(squares));  // inf if the sum is
  const float safe = length > kLeastNorm ? length : kLeastNorm;
  for (int i = 0; i < book.size; ++i) row[i] /= safe;
  rotate(book.signs, row);
  const int count = (1 << book.bits) - 1;
  BitWriter writer(words);
  double coded = 0;
  for (int i = 0; i < book.size; ++i) {
    uint32_t code = 0;
    for (int j = 0; j < count; ++j) code += row[i] > book.between[j] ? 1 : 0;
    coded += double{book.levels[code]} * double{book.levels[code]};
    writer.put(code, book.bits);
  }
  *norm = length / static_cast<float>(std::sqrt(coded));
}

void decode_row(const Codebook& book, const uint32_t* words, float norm, float* row) {
  for (int i = 0; i < book.size; ++i) row[i] = book.levels[read_bits(words, i, book.bits)] * norm;
  restore(book.signs, row);
}

}  // namespace mlx_h2o::kernels
