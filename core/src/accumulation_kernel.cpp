#include "accumulation_kernel.h"

#include <algorithm>
#include <cmath>
#include <limits>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF  // GCC is told by CMake
#endif

namespace mlx_h2o::kernels {

void add_scores(const float* scores, int rows, float* sums, float* counts) {
  for (int row = 0; row < rows; ++row) {
    const bool seen = scores[row] > -std::numeric_limits<float>::infinity();
    sums[row] += seen ? scores[row] : 0.0f;
    counts[row] += seen ? 1.0f : 0.0f;
  }
}

void accumulate(const float* sums, const float* counts, int rows, Decay decay, float* importance) {
  for (int row = 0; row < rows; ++row) {
    const float before = importance[row];
    const float count = counts[row];
    const float score = std::fabs(sums[row] / (count > 1.0f ? count : 1.0f));
    const float averaged = decay.keep * before + decay.take * score;
    const float scored = before != before ? score : averaged;
    importance[row] = count > 0.0f ? scored : before;
  }
}

void accumulate_scores(const AccumulationArguments& a, float* workspace) {
  float* sums = workspace;
  float* counts = workspace + a.rows;
  for (int batch = 0; batch < a.batch; ++batch) {
    for (int head = 0; head < a.heads; ++head) {
      float* importance = a.importance + (static_cast<int64_t>(batch) * a.heads + head) * a.rows;
      for (int query = 0; query < a.query_count; ++query) {
        std::fill(sums, sums + 2 * static_cast<int64_t>(a.rows), 0.0f);
        for (int member = 0; member < a.group; ++member) {
          const float* scores = a.scores + batch * a.score_strides[0] +
                                (head * a.group + member) * a.score_strides[1] +
                                query * a.score_strides[2];
          add_scores(scores, a.rows, sums, counts);
        }
        accumulate(sums, counts, a.rows, a.decay, importance);
      }
    }
  }
}

}  // namespace mlx_h2o::kernels
