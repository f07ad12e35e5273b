// What both suites of the native test share: random numbers, and a count of mismatches.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>

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

}  // namespace mlx_h2o::test
