#include "rows/selection_kernel.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/half.h"
#include "cpu/thread_pool.h"

namespace mlx_h2o::kernels {
namespace {

// The retention order of a row: the greater is kept. Slots differ, so no two ranks are equal.
struct Rank {
  uint64_t value;  // class; within kScored, then the score as an ordered integer
  int32_t order;   // descending: position, or slot for padding
  uint32_t slot;   // descending: only where two positions are equal

  bool operator<(const Rank& other) const {
    if (value != other.value) return value < other.value;
    if (order != other.order) return order > other.order;
    return slot > other.slot;
  }
};

enum RetentionClass : uint64_t { kPadding = 0, kNotANumber = 1, kScored = 2, kProtected = 3 };

// Maps floats other than NaN to integers of the same order; -0 and +0 are equal.
uint32_t ordered(float score) {
  const uint32_t bits = to_bits(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// One head.
struct Head {
  const SelectionArguments& a;
  const float* scores;
  const int32_t* positions;
  Zones zones;
};

Rank rank(const Head& head, int slot) {
  const int32_t position = head.positions[slot * head.a.position_strides[2]];
  const auto unscored = [&](RetentionClass retention, int32_t order) {
    return Rank{uint64_t{retention} << 32, order, static_cast<uint32_t>(slot)};
  };
  if (position < 0) return unscored(kPadding, slot);
  if (position < head.zones.sink_size || position >= head.zones.recent_start) {
    return unscored(kProtected, position);
  }
  const float score = head.scores[slot * head.a.score_strides[2]];
  if (std::isnan(score)) return unscored(kNotANumber, position);
  return {uint64_t{kScored} << 32 | ordered(score), position, static_cast<uint32_t>(slot)};
}

void keep_of_head(const Head& head, int keep, uint32_t* result) {
  std::vector<Rank> ranks(static_cast<size_t>(head.a.rows));
  for (int slot = 0; slot < head.a.rows; ++slot) {
    ranks[static_cast<size_t>(slot)] = rank(head, slot);
  }
  const auto end = ranks.begin() + keep;
  if (keep < head.a.rows) {
    std::nth_element(ranks.begin(), end, ranks.end(),
                     [](const Rank& x, const Rank& y) { return y < x; });
  }
  std::transform(ranks.begin(), end, result, [](const Rank& x) { return x.slot; });
  std::sort(result, result + keep);
}

}  // namespace

void keep_indices(const SelectionArguments& a, int keep, uint32_t* result) {
  // Sorting costs about 20 times as much as looking at each row once.
  const int64_t work = int64_t{a.rows} * 20;
  parallel_for(
      int64_t{a.batch} * a.heads,
      [&](int64_t item) {
        const int64_t batch = item / a.heads;
        const int64_t head = item % a.heads;
        keep_of_head({a, a.scores + batch * a.score_strides[0] + head * a.score_strides[1],
                      a.positions + batch * a.position_strides[0] + head * a.position_strides[1],
                      a.zones_of(batch)},
                     keep, result + item * keep);
      },
      std::max<int64_t>(1, 65536 / work));
}

}  // namespace mlx_h2o::kernels
