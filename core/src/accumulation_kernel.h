// The moving average of scores, on plain memory: no MLX in here, so that tests can drive it alone.
#pragma once

#include <cstdint>

namespace mlx_h2o::kernels {

/// The factors of C = keep * C + take * |s|: keep is the decay a, take is 1 - a, computed in double
/// precision and rounded once.
struct Decay {
  float keep, take;

  static Decay of(double a) { return {static_cast<float>(a), static_cast<float>(1 - a)}; }
};

/// Adds the scores of one query head to `sums`, and 1 to `counts` where the pair is unmasked:
/// where the score is neither -inf nor NaN.
void add_scores(const float* scores, int rows, float* sums, float* counts);

/// One step of the average: `s` is sums / counts; rows whose count is 0 stay as they are, and a
/// row that is NaN, not yet scored, becomes |s|. Multiplications and additions are not fused, so
/// that every back end and language can repeat them.
void accumulate(const float* sums, const float* counts, int rows, Decay decay, float* importance);

/// One call. Strides count elements; the last axis of scores has stride 1.
struct AccumulationArguments {
  int batch, heads, group;  // heads of the cache, and query heads of each
  int query_count, rows;
  const float* scores;  // [batch, heads * group, query_count, rows]
  int64_t score_strides[3];
  float* importance;  // [batch, heads, rows], contiguous, updated in place
  Decay decay;
};

/// The number of floats that `accumulate_scores` needs as scratch memory.
inline int64_t accumulation_workspace_size(int rows) { return 2 * static_cast<int64_t>(rows); }

/// Takes in the queries in order. O(batch * heads * group * query_count * rows).
void accumulate_scores(const AccumulationArguments& arguments, float* workspace);

}  // namespace mlx_h2o::kernels
