// Random choices of rows against a full sort by the documented order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

#include "check.h"
#include "rows/selection_kernel.h"

namespace mlx_h2o::test {

/// The slots of one head, best first.
inline std::vector<uint32_t> retention_order(const float* scores, const int32_t* positions,
                                             int rows, const kernels::Zones& zones) {
  const auto rank = [&](uint32_t slot) {
    const float score = scores[slot];
    const int32_t position = positions[slot];
    if (position < 0) return std::tuple(3, 0.0, static_cast<int>(slot));
    if (position < zones.sink_size || position >= zones.recent_start) {
      return std::tuple(0, 0.0, position);
    }
    if (std::isnan(score)) return std::tuple(2, 0.0, position);
    return std::tuple(1, -static_cast<double>(score), position);
  };
  std::vector<uint32_t> order(static_cast<size_t>(rows));
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t x, uint32_t y) { return rank(x) < rank(y); });
  return order;
}

inline void test_selection(Random& random, int cases, Report& report) {
  static constexpr float kScores[] = {0.0f,
                                      -0.0f,
                                      1.0f,
                                      -1.0f,
                                      std::numeric_limits<float>::infinity(),
                                      -std::numeric_limits<float>::infinity(),
                                      std::numeric_limits<float>::quiet_NaN()};
  for (int i = 0; i < 4 * cases; ++i) {
    const int rows = random.one_in(10) ? random.between(255, 300) : random.between(1, 40);
    const int heads = random.between(1, 3);
    const int slack = random.between(0, 2);
    kernels::SelectionArguments a{};
    a.batch = random.between(1, 2);
    a.heads = heads;
    a.rows = rows;
    a.sink_size = random.between(0, 4);
    const std::vector<int32_t> starts{random.between(0, 2 * rows), random.between(0, 2 * rows)};
    if (random.one_in(2)) a.recent_start = starts.data();
    a.recent_start_stride = random.between(0, 1);
    const int64_t stride = rows + slack;
    const int64_t strides[3] = {heads * stride, stride, 1};
    std::copy_n(strides, 3, a.score_strides);
    std::copy_n(strides, 3, a.position_strides);
    const auto total = static_cast<size_t>(a.batch * heads);
    std::vector<float> scores;
    std::vector<int32_t> positions;
    for (size_t head = 0; head < total; ++head) {
      std::vector<int32_t> order(static_cast<size_t>(2 * rows));
      std::iota(order.begin(), order.end(), 0);
      for (size_t n = order.size() - 1; n > 0; --n) {
        std::swap(order[n], order[static_cast<size_t>(random.between(0, static_cast<int>(n)))]);
      }
      for (int64_t n = 0; n < stride; ++n) {
        // Slack: rows that would win if they were looked at.
        scores.push_back(n >= rows          ? std::numeric_limits<float>::infinity()
                         : random.one_in(2) ? random.choose(kScores)
                                            : random.normal());
        positions.push_back(n < rows && random.one_in(8) ? -1
                            : n < rows                   ? order[static_cast<size_t>(n)]
                                                         : 0);
      }
    }
    a.scores = scores.data();
    a.positions = positions.data();
    const int keep = random.one_in(3) ? 1 : random.between(1, rows);
    std::vector<uint32_t> kept(total * static_cast<size_t>(keep));
    kernels::keep_indices(a, keep, kept.data());
    for (size_t head = 0; head < total; ++head) {
      const size_t first = head * static_cast<size_t>(stride);
      const kernels::Zones zones = a.zones_of(static_cast<int64_t>(head) / heads);
      auto best = retention_order(scores.data() + first, positions.data() + first, rows, zones);
      best.resize(static_cast<size_t>(keep));
      std::sort(best.begin(), best.end());
      const size_t at = head * static_cast<size_t>(keep);
      if (!std::equal(best.begin(), best.end(), kept.begin() + static_cast<std::ptrdiff_t>(at))) {
        report.mismatch("keep_indices: N=%d keep=%d head %zu", rows, keep, head);
      }
    }
  }
}

}  // namespace mlx_h2o::test
