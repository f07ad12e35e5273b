// The moving average of scores, on plain memory: no MLX in here, so that tests can run it alone.
#pragma once

#include <cstdint>

namespace mlx_h2o::kernels {

enum class SimdTarget;

/// The factors of C = keep * C + take * |s|: keep is the decay a, take is 1 - a, computed in double
/// precision and rounded once.
struct Decay {
  float keep, take;

  static Decay of(double a) { return {static_cast<float>(a), static_cast<float>(1 - a)}; }
};

/// Some consecutive rows of one head, and the scores of queries for them.
struct ScoredBlock {
  int count;  // rows
  // The scores of member m of the group for query q begin at (m * query_count + q) * stride.
  int group = 1;
  int query_count = 1;
  const float* scores = nullptr;
  int64_t stride = 0;
  Decay decay = {0, 1};
  float* importance = nullptr;  // [count], updated
};

/// Adds the queries in order. For each query, `s` is the mean of the row's unmasked scores (neither
/// -inf nor NaN). A row without unmasked scores does not change; a row that is NaN, not yet scored,
/// becomes |s|. Multiplications and additions are not fused, so that every back end and language
/// can reproduce the results. O(group * queries * count).
void accumulate_block(const ScoredBlock& block, SimdTarget target);

/// One call. Strides count elements; the last axis of scores has stride 1.
struct AccumulationArguments {
  int batch, heads, group;  // heads of the cache, and query heads of each
  int query_count, rows;
  const float* scores;  // [batch, heads * group, query_count, rows]
  int64_t score_strides[3];
  float* importance;  // [batch, heads, rows], contiguous, updated in place
  Decay decay;
};

/// Adds the queries in order. O(batch * heads * group * query_count * rows), shared by the threads
/// of thread_pool.h.
void accumulate_scores(const AccumulationArguments& arguments, SimdTarget target);

}  // namespace mlx_h2o::kernels
