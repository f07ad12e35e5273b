// Scores taken into the moving average block by block, as attention does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "rows/accumulation_kernel.h"

namespace mlx_h2o::test {

inline kernels::SimdTarget random_target(Random& random) {
  for (;;) {
    const kernels::SimdTarget target = random.choose(kernels::kSimdTargets);
    if (kernels::is_supported(target)) return target;
  }
}

/// Blocks in any order make one importance.
inline void test_scored_blocks(Random& random, int cases, Report& report) {
  static constexpr float kZeros[] = {0.0f, -0.0f};
  for (int i = 0; i < cases; ++i) {
    const int rows = random.between(1, 400);
    const int block_rows = random.between(1, 200);
    const kernels::SimdTarget target = random_target(random);
    std::vector<float> importance;
    std::vector<float> scores;
    const int group = random.between(1, 9);
    const int unscored = random.one_in(2) ? 3 : 100'000;
    for (int row = 0; row < rows; ++row) {
      importance.push_back(random.one_in(unscored) ? std::numeric_limits<float>::quiet_NaN()
                           : random.one_in(2)      ? random.choose(kZeros)
                                                   : std::fabs(random.normal()));
    }
    for (int n = 0; n < rows * group; ++n) {
      scores.push_back(random.one_in(3) ? -std::numeric_limits<float>::infinity()
                                        : static_cast<float>(random.between(-2, 2)));
    }
    std::vector<float> expected = importance;
    kernels::AccumulationArguments whole{};
    whole.batch = whole.heads = whole.query_count = 1;
    whole.group = group;
    whole.rows = rows;
    whole.scores = scores.data();
    whole.score_strides[1] = rows;
    whole.importance = expected.data();
    whole.decay = kernels::Decay::of(0.9);
    kernels::accumulate_scores(whole, target);

    const int blocks = (rows + block_rows - 1) / block_rows;
    const int turn = random.between(0, blocks - 1);
    for (int n = 0; n < blocks; ++n) {
      kernels::ScoredBlock block;
      const int first = (n + turn) % blocks * block_rows;
      block.count = std::min(block_rows, rows - first);
      block.group = group;
      block.scores = scores.data() + first;
      block.stride = rows;
      block.decay = whole.decay;
      block.importance = importance.data() + first;
      kernels::accumulate_block(block, target);
    }
    if (std::memcmp(importance.data(), expected.data(), importance.size() * sizeof(float)) != 0) {
      report.mismatch("importance by blocks of target %s, case %d", kernels::target_name(target),
                      i);
    }
  }
}

}  // namespace mlx_h2o::test
