// One pass over the rows of a head: the moving average, or the search for the worst row. In the
// compiler's own vectors, which every target has; the rows behind the last whole vector one by one,
// by the same text. Included once per SIMD target, after its simd_*.h: hence no include guard.

using Floats = float __attribute__((vector_size(sizeof(Vector))));
using Ints = int32_t __attribute__((vector_size(sizeof(Vector))));

template <typename To, typename From>
inline To lanes_at(const From* from) {
  To lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline bool all_finite(float value) { return value - value == 0; }
inline bool all_finite(Floats value) {
  return nonzero_lanes(reinterpret_cast<Vector>(value - value)) == 0;  // inf and NaN become NaN
}

inline float absolute(float value) { return std::fabs(value); }
inline Floats absolute(Floats value) {
  const Ints bits = lanes_at<Ints>(&value) & std::numeric_limits<int32_t>::max();
  return lanes_at<Floats>(&bits);
}

// The mean of the scores that are not masked (-inf or NaN), and their number.
template <typename Float>
struct Mean {
  Float value{}, count{};

  Mean(const float* scores, int64_t stride, int members) {
    const Float one = Float{} + 1.0f;
    for (int member = 0; member < members; ++member) {
      const auto score = lanes_at<Float>(scores + member * stride);
      value += score > -kInfinity ? score : Float{};
      count += score > -kInfinity ? one : Float{};
    }
    value /= count > one ? count : one;
  }
};

// C = keep * C + take * |mean|; `before` is C. Members is the number of the group's members where
// that is a small power of two, else 0.
template <int Members, typename Float>
inline Float averaged(const float* scores, int64_t stride, int members, Decay decay, Float before) {
  const auto with = [&](Float score) {
    const Float result = decay.keep * before + decay.take * score;
    return before == before ? result : score;
  };
  if constexpr (Members != 0) {
    auto sum = lanes_at<Float>(scores);
    MLX_H2O_UNROLL
    for (int member = 1; member < Members; ++member) {
      sum += lanes_at<Float>(scores + member * stride);
    }
    // Nothing is masked, and the product by a power of two has the bits of the division.
    if (all_finite(sum)) return with(absolute(sum * (1.0f / Members)));
  }
  const Mean<Float> mean(scores, stride, members);
  return mean.count > 0 ? with(absolute(mean.value)) : before;
}

// The worst of the rows that each lane has seen.
template <typename Float, typename Int>
struct WorstOfLanes {
  static constexpr int kCount = std::is_same_v<Int, int32_t> ? 1 : kLanes;

  Int sink_size, recent_start;  // of the zones, in every lane
  Int rank = Int{} + Worst::kProtected;
  Int order = Int{} - 1;
  Int slot{};

  explicit WorstOfLanes(Zones zones)
      : sink_size(Int{} + zones.sink_size), recent_start(Int{} + zones.recent_start) {}

  // In the order of Worst::rank; signed, as the comparisons of vectors are.
  Int rank_of(Float score, Int position) const {
    score += 0.0f;  // -0 and +0 are equal
    const auto bits = lanes_at<Int>(&score);
    Int rank = bits ^ ((bits >> 31) & Worst::kProtected);
    rank = score == score ? rank : Int{} + Worst::kNotANumber;
    rank = position >= recent_start ? Int{} + Worst::kProtected : rank;
    rank = position < sink_size ? Int{} + Worst::kProtected : rank;
    return position < 0 ? Int{} + Worst::kPadding : rank;
  }

  // The slots ascend from one call to the next: of equals the later goes.
  void join(Float score, Int position, Int own_slot) {
    const Int own_rank = rank_of(score, position);
    const Int own_order = position < 0 ? own_slot : position;
    const auto later = (own_rank < rank) | ((own_rank == rank) & (own_order >= order));
    rank = later ? own_rank : rank;
    order = later ? own_order : order;
    slot = later ? own_slot : slot;
  }

  void put(Worst& worst) const {
    int32_t ranks[kCount], orders[kCount], slots[kCount];
    std::memcpy(ranks, &rank, sizeof rank);
    std::memcpy(orders, &order, sizeof order);
    std::memcpy(slots, &slot, sizeof slot);
    int32_t least = Worst::kProtected;
    for (int32_t own : ranks) least = own < least ? own : least;
    for (int lane = 0; lane < kCount; ++lane) {
      if (ranks[lane] != least) continue;
      worst.join({ranks[lane], orders[lane], static_cast<uint32_t>(slots[lane])});
    }
  }
};

// Whole vectors of rows, then those behind them: `work` is told the first row, and the type to use.
template <typename Work>
inline void for_rows(int count, const Work& work) {
  int row = 0;
  for (; row + kLanes <= count; row += kLanes) work(row, Floats{});
  for (; row < count; ++row) work(row, 0.0f);
}

template <int Members>
inline void take_in_group(const ScoredBlock& block) {
  const ScoredBlock b = block;  // which no store can change
  for_rows(b.count, [&](int row, auto of_type) {
    auto importance = lanes_at<decltype(of_type)>(b.importance + row);
    for (int query = 0; query < b.query_count; ++query) {
      importance = averaged<Members>(b.scores + query * b.stride + row, b.query_count * b.stride,
                                     b.group, b.decay, importance);
    }
    std::memcpy(b.importance + row, &importance, sizeof importance);
  });
}

inline void take_in(const ScoredBlock& block) {
  switch (block.group) {
    case 1:
      return take_in_group<1>(block);
    case 2:
      return take_in_group<2>(block);
    case 4:
      return take_in_group<4>(block);
    case 8:
      return take_in_group<8>(block);
    default:
      return take_in_group<0>(block);
  }
}

inline void search(const float* scores, const int32_t* positions, int count, Zones zones,
                   Worst& worst) {
  WorstOfLanes<Floats, Ints> lanes(zones);
  WorstOfLanes<float, int32_t> rest(zones);
  Ints slots;
  for (int lane = 0; lane < kLanes; ++lane) slots[lane] = lane;
  for_rows(count, [&](int row, auto of_type) {
    if constexpr (std::is_same_v<decltype(of_type), float>) {
      rest.join(scores[row], positions[row], row);
    } else {
      lanes.join(lanes_at<Floats>(scores + row), lanes_at<Ints>(positions + row), slots);
      slots += kLanes;
    }
  });
  lanes.put(worst);
  rest.put(worst);
}
