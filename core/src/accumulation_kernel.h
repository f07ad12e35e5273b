// The moving average of scores and the search for the row that goes next, on plain memory: no MLX
// in here, so that tests can drive it alone.
#pragma once

#include <cstdint>
#include <limits>

namespace mlx_h2o::kernels {

enum class SimdTarget;

/// The factors of C = keep * C + take * |s|: keep is the decay a, take is 1 - a, computed in double
/// precision and rounded once.
struct Decay {
  float keep, take;

  static Decay of(double a) { return {static_cast<float>(a), static_cast<float>(1 - a)}; }
};

/// Rows at 0 <= position < sink_size, and at position >= recent_start, are protected.
struct Zones {
  int32_t sink_size = 0;
  int32_t recent_start = std::numeric_limits<int32_t>::max();  // none
};

/// The row that evict_indices(count = 1) names, of those that were looked at.
struct Worst {
  static constexpr int32_t kPadding = std::numeric_limits<int32_t>::min();
  static constexpr int32_t kNotANumber = kPadding + 1;
  static constexpr int32_t kProtected = std::numeric_limits<int32_t>::max();

  /// The lowest goes: one of these, or between them the score as an integer of the same order.
  int32_t rank = kProtected;
  int32_t order = -1;  // of equals the highest goes: the position, or the slot of padding
  uint32_t slot = 0;

  void join(const Worst& other) {
    const bool later = other.order != order ? other.order > order : other.slot > slot;
    if (other.rank != rank ? other.rank < rank : later) *this = other;
  }
};

/// Some rows of one head that follow each other, and scores of queries for them.
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

/// Takes the queries in, in order. For each query `s` is the mean of the row's scores that are not
/// masked (-inf or NaN); a row without one stays as it is, and a row that is NaN, not yet scored,
/// becomes |s|. Multiplications and additions are not fused, so that every back end and language
/// can repeat them. O(group * queries * count).
void accumulate_block(const ScoredBlock& block, SimdTarget target);

/// The worst of `count` rows by `scores`.
Worst find_worst(const float* scores, const int32_t* positions, int count, Zones zones,
                 SimdTarget target);

/// One call. Strides count elements; the last axis of scores has stride 1.
struct AccumulationArguments {
  int batch, heads, group;  // heads of the cache, and query heads of each
  int query_count, rows;
  const float* scores;  // [batch, heads * group, query_count, rows]
  int64_t score_strides[3];
  float* importance;  // [batch, heads, rows], contiguous, updated in place
  Decay decay;
};

/// Takes in the queries in order. O(batch * heads * group * query_count * rows), shared by the
/// threads of thread_pool.h.
void accumulate_scores(const AccumulationArguments& arguments, SimdTarget target);

}  // namespace mlx_h2o::kernels
