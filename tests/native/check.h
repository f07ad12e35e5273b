// What the suites of the native test share: random numbers, a count of mismatches, a softmax.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "attention/attention_kernel.h"

namespace mlx_h2o::test {

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}

  /// An integer of [low, high].
  int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  bool one_in(int n) { return between(1, n) == 1; }
  float normal() { return normal_(engine_); }

  template <typename T, size_t N>
  T choose(const T (&values)[N]) {
    return values[between(0, static_cast<int>(N) - 1)];
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_{0, 1};
};

/// Counts mismatches and prints the first few of each kind, which is what stands before a comma or
/// a colon.
class Report {
 public:
  __attribute__((format(printf, 2, 3))) void mismatch(const char* format, ...) {
    ++mismatches_;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (++kinds_[std::string(text, std::strcspn(text, ",:"))] > 10) return;
    std::fprintf(stderr, "%s\n", text);
  }
  long mismatches() const { return mismatches_; }

 private:
  long mismatches_ = 0;
  std::map<std::string, int> kinds_;
};

inline bool near(double found, double expected, double tolerance) {
  if (std::isnan(expected)) return std::isnan(found);
  return std::fabs(found - expected) <= tolerance * std::max(1.0, std::fabs(expected));
}

inline kernels::SimdTarget random_target(Random& random) {
  for (;;) {
    const kernels::SimdTarget target = random.choose(kernels::kSimdTargets);
    if (kernels::is_supported(target)) return target;
  }
}

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInf = std::numeric_limits<double>::infinity();

/// Of logits and a sink, -inf where there is none; a weight is exp(logit - peak) / total.
struct Softmax {
  double peak, total = 0;

  Softmax(const std::vector<double>& logits, double sink) : peak(sink) {
    for (const double logit : logits) peak = logit > peak ? logit : peak;  // never NaN
    if (peak == -kInf) return;
    total = std::exp(sink - peak);
    for (const double logit : logits) total += std::exp(logit - peak);
  }
  double weight(double logit) const { return total == 0 ? 0 : std::exp(logit - peak) / total; }
};

}  // namespace mlx_h2o::test
